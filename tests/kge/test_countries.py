"""The built-in graph of the world's countries, against the recipe of its three tasks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kge_graphs import labeled

import aswa_hf.kge
from aswa_hf.kge.data import load_kg

# A warning that no test expects is a failure.
pytestmark = pytest.mark.filterwarnings("error::UserWarning")


def facts() -> tuple[set, dict[str, str], dict[str, str], dict[str, set[str]], dict[str, str]]:
    """The raw facts of countries.tsv, read here without the package."""
    lines = (Path(aswa_hf.kge.__file__).parent / "countries.tsv").read_text(encoding="ascii").split("\n")
    rows = [line.split("\t") for line in lines[1:-1]]
    assert lines[0].split("\t") == ["country", "subregion", "region", "split", "neighbors"]
    subregion, region, split = ({row[0]: row[i] for row in rows} for i in (1, 2, 3))
    return {row[0] for row in rows}, subregion, region, {row[0]: set(row[4].split(" ")) - {""} for row in rows}, split


def test_the_facts_about_countries_are_clean():
    countries, subregion, region, neighbors, _ = facts()
    assert 240 <= len(countries) <= 255
    assert set(region.values()) == {"africa", "americas", "asia", "europe", "oceania"}
    assert len(set(subregion.values())) == 22
    assert len({(subregion[c], region[c]) for c in countries}) == 22, "a subregion lies in one region"
    labels = [*countries, *set(subregion.values()), *set(region.values())]
    assert len(labels) == len(set(labels)), "a label means one thing"
    assert all(re.fullmatch("[a-z]+(_[a-z]+)*", label) for label in labels)
    for country, around in neighbors.items():
        assert around <= countries - {country}
        assert all(country in neighbors[other] for other in around)
    assert neighbors["france"] >= {"germany", "spain", "italy"}
    assert neighbors["iceland"] == set()
    assert neighbors["portugal"] == {"spain"}
    assert neighbors["kosovo"] == {"albania", "montenegro", "north_macedonia", "serbia"}
    assert (subregion["france"], region["france"]) == ("western_europe", "europe")
    assert (subregion["chile"], region["chile"]) == ("south_america", "americas")


def test_hidden_countries_have_a_neighbor_that_is_not_hidden():
    countries, _, _, neighbors, split = facts()
    hidden = {country for country in countries if split[country] != "train"}
    assert [list(split.values()).count(name) for name in ("validation", "test")] == [24, 24]
    assert all(neighbors[country] - hidden for country in hidden)


@pytest.mark.parametrize("task", [1, 2, 3])
def test_countries_follow_the_recipe_exactly(task):
    countries, subregion, region, neighbors, split = facts()
    hidden = {country for country in countries if split[country] != "train"}
    full = {(c, "locatedin", subregion[c]) for c in countries} | {(c, "locatedin", region[c]) for c in countries}
    full |= {(subregion[c], "locatedin", region[c]) for c in countries}
    full |= {(c, "neighbor", other) for c in countries for other in neighbors[c]}
    held_out = {name: {(c, "locatedin", region[c]) for c in countries if split[c] == name} for name in split.values()}
    removed = held_out["validation"] | held_out["test"]
    if task >= 2:
        removed |= {(c, "locatedin", subregion[c]) for c in hidden}
    if task >= 3:
        removed |= {(n, "locatedin", region[n]) for c in hidden for n in neighbors[c]}

    kg = load_kg(f"countries-s{task}")
    assert sorted(labeled(kg, "train")) == sorted(full - removed)
    for name in ("validation", "test"):
        assert sorted(labeled(kg, name)) == sorted(held_out[name])
    assert kg.vocab.relations == ["locatedin", "neighbor"]
    assert (kg.num_entities, kg.num_relations) == (len(countries) + 22 + 5, 2)
    assert set(kg.vocab.entities) == {*countries, *subregion.values(), *region.values()}


def test_countries_is_s1_and_what_one_knows_of_the_world_is_in_it():
    kg = load_kg("countries")
    assert [labeled(kg, split) for split in kg] == [labeled(load_kg("countries-s1"), split) for split in kg]
    train = set(labeled(kg, "train"))
    assert {("france", "neighbor", "germany"), ("germany", "neighbor", "france")} <= train
    assert {("france", "locatedin", "western_europe"), ("western_europe", "locatedin", "europe")} <= train
    assert repr(kg) == "KnowledgeGraph(countries: 275 entities, 2 relations; train 1,120, validation 24, test 24)"
