"""Settings of a link predictor: what is refused, and with which words."""

import math

import pytest
from huggingface_hub.errors import StrictDataclassError
from kge_graphs import write_graph

from aswa_hf.kge import KGEConfig, load_kg


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_entities": 0}, "num_entities must be at least 1, got 0"),
        ({"dim": -3}, "dim must be at least 1, got -3"),
        ({"p": -1}, "p must be finite and not negative, got -1"),
        ({"regularizer": "n3", "regularization": math.nan}, "regularization must be finite .*got nan"),
        ({"initializer_range": -0.1}, "initializer_range must be finite and not negative, got -0.1"),
        ({"initializer_range": math.inf}, "initializer_range must be finite"),
        ({"input_dropout": -1}, r"input_dropout must be in \[0, 1\), got -1"),
        ({"query_dropout": 1.0}, r"query_dropout must be in \[0, 1\), got 1.0"),
        ({"label_smoothing": 2}, r"label_smoothing must be in \[0, 1\), got 2"),
        ({"label_smoothing": math.nan}, r"label_smoothing must be in \[0, 1\), got nan"),
        (
            {"regularization": 0.1},
            "regularization=0.1 has no effect without a regularizer: set regularizer to one of n3, l2",
        ),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KGEConfig(**{"num_entities": 3, "num_relations": 2, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 2.5}, "'dim' expected int, got float"),
        ({"dim": "12"}, "'dim' expected int, got str"),
        ({"num_entities": None}, "'num_entities' expected int, got NoneType"),
        ({"inverse_relations": "no"}, "'inverse_relations' expected bool, got str"),
        ({"initializer": 3}, "'initializer' expected str, got int"),
    ],
)
def test_values_of_a_wrong_type_are_refused(options, message):
    with pytest.raises(StrictDataclassError, match=message):
        KGEConfig(**{"num_entities": 3, "num_relations": 2, **options})


def test_whole_numbers_are_fine_for_real_settings_and_survive_the_file(tmp_path):
    config = KGEConfig(num_entities=3, num_relations=2, input_dropout=0, regularizer="l2", regularization=1)
    config.save_pretrained(tmp_path)
    loaded = KGEConfig.from_pretrained(tmp_path)
    assert {**loaded.to_dict(), **config.to_dict()} == loaded.to_dict()


def test_a_graph_returns_the_config_of_a_model_for_it(tmp_path):
    kg = load_kg(write_graph(tmp_path))
    config = kg.config(scorer="keci", dim=64)
    assert config.to_dict() == KGEConfig(num_entities=3, num_relations=2, scorer="keci", dim=64).to_dict()
    with pytest.raises(TypeError, match=r"Unknown option 'label_smothing'\. Did you mean 'label_smoothing'\?"):
        kg.config(label_smothing=0.1)
    with pytest.raises(TypeError, match=r"Unknown option 'x'\. See KGEConfig"):
        kg.config(x=1)
