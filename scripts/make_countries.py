"""Writes aswa_hf/kge/countries.tsv: the facts behind `load_kg("countries")`, and which countries are hidden.

The facts (names, borders, subregions, regions) are those of the PyPI package countryinfo, corrected where they are
wrong. Of its two versions the newer one knows more countries, and only the older one divides Africa and Latin America:

    pip install --no-deps --target /tmp/new countryinfo==1.0.1
    pip install --no-deps --target /tmp/old countryinfo==0.1.2
    python scripts/make_countries.py /tmp/new /tmp/old
"""

from __future__ import annotations

import json
import random
import re
import sys
import unicodedata
from pathlib import Path

OUTPUT = Path(__file__).parent.parent / "aswa_hf" / "kge" / "countries.tsv"
SEED = 0
HIDDEN = 24  # countries in validation, and as many in test: those of the published splits

NO_LONGER = {"ANT", "SCG"}  # Netherlands Antilles, Serbia and Montenegro: their successors are listed too
NOT_IN_A_REGION = {"ATA", "HMD"}  # Antarctica, Heard Island
COARSE = {"Sub-Saharan Africa", "Latin America and the Caribbean"}
CODES = {"KOS": "XKX", "IT": "ITA"}
NAMES = {
    "BHS": "Bahamas",
    "CZE": "Czechia",
    "GMB": "Gambia",
    "MAF": "Saint Martin",
    "MKD": "North Macedonia",
    "PSE": "Palestine",
    "SGS": "South Georgia and the South Sandwich Islands",
    "SWZ": "Eswatini",
    "SXM": "Sint Maarten",
    "VAT": "Vatican City",
    "VGB": "British Virgin Islands",
    "VIR": "United States Virgin Islands",
}
# What neither version has, and three places where they differ from the United Nations' list (M49).
SUBREGIONS = {
    "ATF": "Eastern Africa",
    "BES": "Caribbean",
    "BLM": "Caribbean",
    "BVT": "South America",
    "CUW": "Caribbean",
    "MAF": "Caribbean",
    "MNE": "Southern Europe",
    "SRB": "Southern Europe",
    "SSD": "Eastern Africa",
    "SXM": "Caribbean",
    "TCA": "Caribbean",
    "VGB": "Caribbean",
    "VIR": "Caribbean",
}
# Given by one side only, and not so: claimed, across water, through a territory that is listed itself, or a mistake.
NO_BORDERS = {
    frozenset(pair)
    for pair in (
        ("ALB", "SRB"),
        ("AFG", "IND"),
        ("BTN", "MMR"),
        ("CYP", "GBR"),
        ("FRA", "SUR"),
        ("IRN", "KWT"),
        ("SSD", "TCD"),
    )
}
ONE_MORE_BORDER = frozenset(("MAF", "SXM"))  # one island, two countries, in neither version
KOSOVO = {"name": "Kosovo", "region": "Europe", "subregion": "Southern Europe"}  # its neighbors know it by its code


def read(folder: str) -> list[dict]:
    files = sorted((Path(folder) / "countryinfo" / "data").glob("*.json"))
    entries = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return [entry for entry in entries if entry.get("ISO", {}).get("alpha3") and entry.get("name")]


def label(name: str) -> str:
    """`Côte d'Ivoire` → `cote_d_ivoire`."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub("[^a-z]+", "_", plain).strip("_")


def hidden(neighbors: dict[str, set[str]]) -> tuple[set[str], set[str]]:
    """Random countries for validation and test, each left with a neighbor among the others (the training ones)."""
    candidates = sorted(country for country, around in neighbors.items() if around)
    random.Random(SEED).shuffle(candidates)
    chosen: list[str] = []
    for country in candidates:
        if len(chosen) < 2 * HIDDEN and all(neighbors[c] - {*chosen, country} for c in [*chosen, country]):
            chosen.append(country)
    return set(chosen[:HIDDEN]), set(chosen[HIDDEN:])


def main(new: str, old: str) -> None:
    finer = {entry["ISO"]["alpha3"]: entry["subregion"] for entry in read(old) if entry.get("subregion")}
    countries: dict[str, dict] = {"XKX": KOSOVO}
    borders = {ONE_MORE_BORDER}
    for entry in read(new):
        code = entry["ISO"]["alpha3"]
        if code not in NO_LONGER | NOT_IN_A_REGION:
            countries.setdefault(code, entry)
            borders |= {frozenset((code, CODES.get(other, other))) for other in entry.get("borders") or []}
    borders = {pair for pair in borders - NO_BORDERS if len(pair) == 2}
    unknown = set().union(*borders) - set(countries)
    if unknown:
        raise SystemExit(f"Borders with unknown countries: {sorted(unknown)}. Add them to CODES.")

    names = {code: label(NAMES.get(code, entry["name"])) for code, entry in countries.items()}
    rows, neighbors = {}, {}
    for code, entry in countries.items():
        subregion = SUBREGIONS.get(code) or (finer[code] if entry["subregion"] in COARSE else entry["subregion"])
        rows[names[code]] = label(subregion), label(entry["region"])
        neighbors[names[code]] = {names[other] for pair in borders if code in pair for other in pair - {code}}
    assert len(rows) == len(countries), "two countries of one name"
    assert len(dict(set(rows.values()))) == len(set(rows.values())), "a subregion in two regions"

    validation, test = hidden(neighbors)
    lines = ["country\tsubregion\tregion\tsplit\tneighbors"]
    for name in sorted(rows):
        split = "validation" if name in validation else "test" if name in test else "train"
        lines.append("\t".join([name, *rows[name], split, " ".join(sorted(neighbors[name]))]))
    OUTPUT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
