"""Two processes train one link predictor: the queries are shared out, decisions and weights are the same."""

import json
from collections import Counter

from ddp_run import launch
from training import assert_same_tensors

from aswa_hf.kge import KGEModel, evaluate_link_prediction, load_kg
from aswa_hf.kge.graph import with_inverses


def test_two_processes_share_the_queries_decide_alike_and_hold_the_same_ensemble(tmp_path):
    (tensors, about), (other_tensors, other_about) = launch("kvsall", tmp_path)
    assert about["world_size"] == 2
    assert len(about["histories"]["aswa"]) == 6
    assert len({record["decision"] for record in about["histories"]["aswa"]}) >= 2
    assert about == other_about
    assert_same_tensors(tensors, other_tensors)

    kg = load_kg("countries")
    tails: dict[tuple[int, int], list[int]] = {}
    for head, relation, tail in with_inverses(kg.triples("train"), kg.num_relations).tolist():
        tails.setdefault((head, relation), []).append(tail)
    steps = about["steps"] // 6
    seen = [json.loads((tmp_path / f"rank{rank}.seen.json").read_text()) for rank in (0, 1)]
    for epoch in range(6):
        queries = [[(h, r) for e, h, r, *_ in of_rank if e == epoch] for of_rank in seen]
        assert len(queries[0]) == len(queries[1]) == 160 * steps
        count = Counter(queries[0] + queries[1])
        assert count.keys() == tails.keys()
        # Repeated are only those that fill the last batches.
        assert len(tails) <= count.total() < len(tails) + 2 * 160
        assert max(count.values()) <= 2
    assert all(sorted(found) == sorted(tails[h, r]) for of_rank in seen for _, h, r, *found in of_rank)

    # What the two processes decided by is what one process measures with the same weights.
    scores = {name: history[-1]["score"] for name, history in about["histories"].items()}
    model = KGEModel.from_pretrained(tmp_path / f"checkpoint-{about['steps']}")
    assert evaluate_link_prediction(model, kg, "validation")["mrr"] == about["histories"]["aswa"][-1]["running_score"]
    for name, score in {**scores, "model": scores["aswa"]}.items():
        model.load_state_dict({key.partition("/")[2]: t for key, t in tensors.items() if key.startswith(f"{name}/")})
        assert evaluate_link_prediction(model, kg, "validation")["mrr"] == score
