"""A process in which this package cannot be imported."""

# The beginning of a program for `python -c`.
WITHOUT_THE_PACKAGE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "aswa_hf":
            raise ModuleNotFoundError(f"{name} is not installed here", name=name)

sys.meta_path.insert(0, Absent())
try:
    import aswa_hf
    sys.exit("the package can be imported after all")
except ModuleNotFoundError:
    pass

"""
