"""YAML files that would use up memory or time, or that PyYAML cannot read."""

import pytest

from gptlm.config.files import MAX_YAML, load_yaml
from gptlm.errors import UsageError


def copies(form, levels=12):
    """A file whose last line means 9 to the power of `levels` values."""
    lines = (f"a{level}: &a{level} {form(f'*a{level - 1}')}\n" for level in range(1, levels))
    return "".join(["a0: &a0 {x: 1}\n", *lines])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (copies(lambda name: f"[{', '.join([name] * 9)}]"), "line 7: aliases repeat more than"),
        (copies(lambda name: "{" + ", ".join(f"k{k}: {name}" for k in range(9)) + "}"), "line 7: aliases repeat"),
        (copies(lambda name: f"{{<<: [{', '.join([name] * 9)}]}}"), "line 7: aliases repeat more than"),
        ("a: &a [*a]\n", "line 1: an alias refers to a value that contains the alias"),
        ("a: 1\nb: &b {c: *b}\n", "line 2: an alias refers to a value that contains the alias"),
        ("a: " + "[" * 2000 + "]" * 2000, "nested too deeply"),
        ("a0: &a0 1\n" + "".join(f"a{k}: &a{k} [*a{k - 1}]\n" for k in range(1, 5000)), "aliases repeat more than"),
        ("a: 1\nseed: " + "9" * 10_000, r"line 2: 9{20}\.\.\. is a number of 10,000 characters"),
        ("a: 0x" + "f" * 10_000, "line 1: 0xf+... is a number of 10,002 characters"),
        ("a: " + ":".join(["59"] * 9000), "line 1: 59:59.* is a number of 26,999 characters"),
        ("a: 1\nb: 2026-99-99\n", "q.yaml:2: '2026-99-99' cannot be read .*put it in quotes"),
        ("a: !!int x\n", "q.yaml:1: 'x' cannot be read"),
        ("a: " + "x" * MAX_YAML, "has 262,147 characters, at most 262,144 are read"),
    ],
    ids=range(13),
)
def test_what_cannot_be_a_configuration_is_refused(tmp_path, text, says):
    (tmp_path / "q.yaml").write_text(text)
    with pytest.raises(UsageError, match=says) as error:
        load_yaml(str(tmp_path / "q.yaml"))
    assert len(str(error.value)) < 300


def test_ordinary_aliases_and_numbers_are_read(tmp_path):
    (tmp_path / "q.yaml").write_text("a: &a {x: [1, 2.5e-3]}\nb: *a\nc: [*a, *a]\nd: 2026-01-02\ne: " + "x" * 1000)
    tree = load_yaml(str(tmp_path / "q.yaml"))
    assert tree["b"]["x"].value == [1, 2.5e-3] and tree["c"].value == [{"x": [1, 2.5e-3]}] * 2
    assert str(tree["d"].value) == "2026-01-02" and tree["e"].value == "x" * 1000
