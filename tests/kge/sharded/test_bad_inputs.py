"""What is wrong on one rank is an error on all of them: none waits for another."""

import re

EXPECTED = {
    "fewer queries": "ValueError: The processes differ in the number of queries in a batch: 2 to 3",
    "other tails": "ValueError: The processes differ in the content of a batch",
    "other random numbers": "ValueError: The processes differ in their random state, which dropout needs",
    "a matrix of labels": "ValueError: A matrix of labels of all 13 entities is not supported with sharded entities",
    "other weights": "ValueError: The processes differ in the weights of the model",
    "other relations": "ValueError: The processes differ in the number of relations: 3 to 4",
    "too many processes": "ValueError: A table of 1 rows cannot be sharded over 2 processes.*at most 1 proc",
    "another table": r"ValueError: .*'entity_embeddings.weight' has the shape \(14, 8\), expected \(13, 8\)",
    "no file": "OSError|FileNotFoundError",
    "other triples": "ValueError: The processes differ in the number of triples to rank in 'test'",
    "no inverse relations": "ValueError: Sharded entities need inverse_relations=True",
    "dropout of entities": r"ValueError: entity_dropout=0.1 is not supported with sharded entities",
    "sharded twice": "ValueError: The entities of this model are sharded already",
    "no space": "OSError: .*No space left on device",
}


def test_every_rank_has_the_error(processes, folder):
    for found in processes.run("sharded_jobs.bad_inputs", 2, folder):
        assert found.keys() == EXPECTED.keys()
        for name, message in found.items():
            assert re.match(EXPECTED[name], message, re.DOTALL), (name, message)
    assert not (folder / "no space" / "model.safetensors").exists()
