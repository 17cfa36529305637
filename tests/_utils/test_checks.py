import pytest

from aswa_hf._utils.checks import check_whole_number, is_whole_number


@pytest.mark.parametrize(("value", "least"), [(1, 1), (7, 1), (0, 0), (-2, -2)])
def test_whole_numbers_from_the_least_on_pass(value, least):
    assert is_whole_number(value, least)
    check_whole_number("n", value, least)
    check_whole_number("n", value, least, optional=True)


@pytest.mark.parametrize("value", [0, -1, 2.0, "3", True, [1], float("nan"), None])
def test_anything_else_is_refused_with_name_expectation_and_value(value):
    assert not is_whole_number(value)
    with pytest.raises(ValueError, match=r"^n must be a whole number of at least 1, got ") as error:
        check_whole_number("n", value)
    assert str(error.value).endswith(f"got {value!r}.")


def test_none_passes_where_it_is_optional():
    check_whole_number("n", None, optional=True)
    with pytest.raises(ValueError, match=r"^n must be a whole number of at least 2 or None, got 1\.$"):
        check_whole_number("n", 1, 2, optional=True)
