"""Where things are in the checkout."""

from pathlib import Path

HELPERS = Path(__file__).parent
ROOT = HELPERS.parent.parent
PACKAGE = ROOT / "aswa_hf"
