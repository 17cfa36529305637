"""What the application of a link predictor costs: its start with no network, and a question to it.

    python benchmarks/space.py
    python benchmarks/space.py --data path/to/UMLS path/to/FB15k-237 --json space.json

A Space is written for a model of each graph and started as its reader would start it (`python app.py`), in a process
of its own from which no Hub can be reached; the start ends when the page is served. Then questions are asked over
HTTP, as the page asks them: the first one, and the median of many more. Wall time includes waiting for other
processes, processor time of the application does not: on a busy machine only that is reliable.

`question` is what the page "Ask" computes for one press of its button, `ask` and `neighborhood`, without gradio. The
limit is the one row of scores that the answers are taken from. Both are timed in turn in one process, and the median
is given for each. The weights are random, which changes nothing about the work. Without gradio there are only these.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from aswa_hf.kge import KGEModel, KnowledgeGraph, load_kg
from aswa_hf.space import write_space
from aswa_hf.space.links import Links
from aswa_hf.space.source import open_source

LINE = "{:<14} {:>9} {:>9} {:>9} {:>9} {:>12} {:>9} {:>9} {:>12} {:>9} {:>9}"
COLUMNS = ["graph", "entities", "relations", "start s", "CPU s", "first ms", "later ms", "CPU ms"]
COLUMNS += ["question ms", "limit ms", "x limit"]


def milliseconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - start)


@torch.no_grad()
def question(run: Path, kg: KnowledgeGraph, repeat: int) -> dict[str, float]:
    """Times questions in this process, beside the scores alone."""
    links = Links(open_source(run))
    times: dict[str, list[float]] = {"question": [], "limit": []}
    for head, relation, _ in kg.triples("test")[:repeat]:
        labels = kg.vocab.entities[head], kg.vocab.relations[relation]
        ids = np.array([head]), np.array([relation])
        times["question"].append(milliseconds(lambda: (links.ask(*labels), links.neighborhood(labels[0]))))  # noqa: B023
        times["limit"].append(milliseconds(lambda: links.predictor.score_all(*ids, "tail")))  # noqa: B023
    return {what: statistics.median(of[1:]) for what, of in times.items()}  # the first one loads the model


def processor_seconds(process: int) -> float:
    """Returns what a process has used of the processors, in all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask(address: str, entity: str, relation: str) -> None:
    """Asks a question over HTTP: one request, and the answer as a stream of events."""
    body = json.dumps({"data": [entity, relation, "tail"]}).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{address}/gradio_api/call/ask", body, headers), timeout=60
    ) as answer:
        event = json.load(answer)["event_id"]
    with urllib.request.urlopen(f"{address}/gradio_api/call/ask/{event}", timeout=60) as answer:
        text = answer.read().decode()
    if "event: complete" not in text or 'role=\\"alert\\"' in text:
        raise RuntimeError(f"The application answered: {text[:500]}")


def served(space: Path, kg: KnowledgeGraph, options: argparse.Namespace) -> dict[str, float]:
    """Starts the application of a Space and asks it questions."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"GRADIO_SERVER_PORT": str(port), "HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    environment |= {"OMP_NUM_THREADS": str(options.threads), "PYTHONWARNINGS": "ignore"}
    began = time.perf_counter()
    app = subprocess.Popen(
        [sys.executable, "app.py"], cwd=space, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                with urllib.request.urlopen(address, timeout=60) as page:
                    page.read()
                break
            except (urllib.error.URLError, ConnectionError):
                if app.poll() is not None:
                    raise RuntimeError("The application ended before it answered.") from None
                time.sleep(0.02)
        start, start_cpu = time.perf_counter() - began, processor_seconds(app.pid)
        times, before = [], 0.0
        for number in range(options.repeat):
            head, relation, _ = kg.triples("test")[number % len(kg["test"])]
            labels = kg.vocab.entities[head], kg.vocab.relations[relation]
            times.append(milliseconds(lambda: ask(address, *labels)))  # noqa: B023
            before = before or processor_seconds(app.pid)
        cpu = 1000 * (processor_seconds(app.pid) - before) / max(options.repeat - 1, 1)
    finally:
        app.terminate()
        app.wait()
    return {
        "start": start,
        "start_cpu": start_cpu,
        "first": times[0],
        "later": statistics.median(times[1:]),
        "later_cpu": cpu,
    }


def measure(data: str, options: argparse.Namespace) -> dict[str, Any]:
    kg = load_kg(data)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        run, space = Path(temporary, "run"), Path(temporary, "space")
        KGEModel(kg.config(scorer=options.model, dim=options.dim)).save_pretrained(run)
        kg.vocab.save_pretrained(run)
        (run / "settings.json").write_text(json.dumps({"dataset": {"name": kg.name, "source": data}}))
        row: dict[str, Any] = {"data": data, "entities": kg.num_entities, "relations": kg.num_relations}
        if importlib.util.find_spec("gradio") is not None:
            row |= served(write_space(run, space), kg, options)
        return row | question(run, kg, options.repeat)


def text(row: dict[str, Any]) -> str:
    def cell(name: str, digits: int) -> str:
        return f"{row[name]:.{digits}f}" if name in row else "–"

    cells = [Path(row["data"]).name, f"{row['entities']:,}", f"{row['relations']:,}"]
    cells += [cell("start", 1), cell("start_cpu", 1), cell("first", 0), cell("later", 0), cell("later_cpu", 0)]
    return LINE.format(*cells, cell("question", 1), cell("limit", 2), f"{row['question'] / row['limit']:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=["countries"], help="folders of triples (countries)")
    parser.add_argument("--model", default="complex")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the measurements to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    header = {"torch": torch.__version__, "model": options.model, "dim": options.dim}
    header |= {"threads": options.threads, "load before": round(os.getloadavg()[0], 2)}
    print(", ".join(f"{key} {value}" for key, value in header.items()))
    print(LINE.format(*COLUMNS))
    rows = []
    for data in options.data:
        rows.append(measure(data, options))
        print(text(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"header": header, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
