"""Small knowledge graphs for the tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from aswa_hf.kge.data import KnowledgeGraph, load_kg

TRIPLES = {
    "train": [("a", "likes", "b"), ("b", "likes", "c"), ("c", "knows", "a")],
    "valid": [("a", "likes", "c")],
    "test": [("b", "knows", "a"), ("c", "likes", "c")],
}


def random_graph(
    folder: Path, *, entities: int = 12, relations: int = 3, triples: int = 80, seed: int = 0
) -> KnowledgeGraph:
    """A random graph in which every entity and relation occurs in training."""
    random = np.random.default_rng(seed)
    drawn = np.unique(random.integers(0, (entities, relations, entities), (triples, 3)), axis=0)
    drawn = random.permutation(drawn)
    cycle = [(i, i % relations, (i + 1) % entities) for i in range(entities)]
    drawn = np.array([row for row in drawn.tolist() if tuple(row) not in cycle])
    parts = np.split(drawn, [len(drawn) // 2, 3 * len(drawn) // 4])
    parts[0] = np.concatenate([cycle, parts[0]])
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in zip(("train", "valid", "test"), parts, strict=True):
        lines = [f"e{h}\tr{r}\te{t}\n" for h, r, t in part]
        (folder / f"{name}.txt").write_text("".join(lines))
    return load_kg(folder)


def write_graph(
    folder: Path, triples=TRIPLES, *, suffix: str = ".txt", line: str = "{}\t{}\t{}\n", **contents
) -> Path:
    """A folder with a file per split; `contents` replaces whole files: train="a\\tb\\n", or bytes."""
    folder.mkdir(exist_ok=True)
    for split, rows in triples.items():
        content = contents.get(split, "".join(line.format(*row) for row in rows))
        (folder / (split + suffix)).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def labeled(kg: KnowledgeGraph, split: str) -> list[tuple[str, str, str]]:
    entities, relations = kg.vocab.entities, kg.vocab.relations
    return [(entities[h], relations[r], entities[t]) for h, r, t in kg.triples(split)]


def assert_holds(kg: KnowledgeGraph, triples=TRIPLES) -> None:
    assert labeled(kg, "train") == triples["train"]
    assert labeled(kg, "validation") == triples["valid"]
    assert labeled(kg, "test") == triples["test"]
