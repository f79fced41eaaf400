from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from omnitrain import ConfigError
from omnitrain.config.plain_yaml import write
from omnitrain.config.reading import SourceLocation, Tree, parse_value, read


def written(folder: Path, text: str, name: str = "a.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


def resolved(folder: Path, text: str) -> dict[str, Any]:
    tree = read(written(folder, text))
    tree.resolve()
    return tree.values


@pytest.mark.parametrize(("text", "value"), [
    ("1e-4", 1e-4), ("1E5", 1e5), (".5", 0.5), ("1.", 1.0), ("-3", -3), ("1_000", 1000), ("0", 0),
    (".inf", math.inf), ("-.inf", -math.inf), ("true", True), ("False", False), ("null", None), ("~", None),
    ("on", "on"), ("off", "off"), ("yes", "yes"), ("no", "no"), ("y", "y"),
    ("2024-01-01", "2024-01-01"), ("1:30", "1:30"), ("0o7", "0o7"), ("0x10", "0x10"), ("010", "010"),
    ("'1'", "1"), ("2h30m", "2h30m"), ("[1, a]", [1, "a"]), ("{a: 1e-3}", {"a": 1e-3}), ("a: b", "a: b"),
    ("a # b", "a"), ("", ""), ("*x", "*x"), ("%", "%"), ("<<", "<<"), ("[<<]", ["<<"]),
])  # fmt: skip
def test_yaml_values(text: str, value: Any) -> None:
    parsed = parse_value(text, SourceLocation("here"))
    assert parsed == value and type(parsed) is type(value)


def test_yaml_round_trip(tmp_path: Path) -> None:
    values = {
        "vars": {"a": 1e-5, "b": "on", "c": "1e-4", "d": "null", "e": None, "f": [True, "true", 1.0, 1], "g": "é: #"},
        "trainer": {"x": math.inf, "y": "1:30", "z": "2024-01-01", "0": 1, 3: "0x1", "w": "a\nb", "v": ""},
    }
    assert read(written(tmp_path, write(values))).values == values
    assert yaml.safe_load(write(values)) == values  # by others, too


def test_yaml_anchors_and_merge_keys(tmp_path: Path) -> None:
    plain = resolved(tmp_path, "a: &x {q: 1, r: 2}\nb: {<<: *x, r: 3}\nc: *x\n")
    assert plain == {"a": {"q": 1, "r": 2}, "b": {"q": 1, "r": 3}, "c": {"q": 1, "r": 2}}
    merged = resolved(tmp_path, "a: &a {q: 1}\nb: &b {q: 2, r: 2}\nc: &c {<<: [*a, *b], s: 3}\nd: {<<: *c, r: 4}\n")
    assert merged["c"] == {"q": 1, "r": 2, "s": 3}  # the first of a list wins, as in PyYAML
    assert merged["d"] == {"q": 1, "r": 4, "s": 3}


def test_merged_values_have_lines_of_their_source(tmp_path: Path) -> None:
    text = "a: &a {q: {r: 1,\n t: 2}}\nb: &b {q: 2,\n s: 3}\nc: {<<: [*a, *b]}\nd: {<<: *a, q: 4}\n"
    tree = read(written(tmp_path, text))
    assert tree.values["c"] == {"q": {"r": 1, "t": 2}, "s": 3} and tree.values["d"] == {"q": 4}
    lines = {".".join(key): location.line for key, location in tree.locations.items() if key and key[0] in ("c", "d")}
    assert lines == {"c": 5, "c.q": 1, "c.q.r": 1, "c.q.t": 2, "c.s": 4, "d": 6, "d.q": 6}


@pytest.mark.parametrize(("text", "line", "words"), [
    ("a: 1\nb: 2\na: 3\n", 3, "'a' is here a second time; the first is in line 1"),
    ("a:\n  b: 1\n  c: {d: 1, d: 2}\n", 3, "'d' is here a second time"),
    ("a:\n\tb: 1\n", 2, "Indent with spaces: YAML allows no tabs"),
    ("a: [1,\nb: 2\n", 3, "this is not YAML"),
    ("a: b: c\n", 1, "this is not YAML"),
    ("- 1\n- 2\n", 1, "expected names with values"),
    ("only words\n", 1, "expected names with values"),
    ("a: !!python/object/apply:os.system ['true']\n", 1, "not known. Only plain values are read"),
    ("a: !thing 3\n", 1, "not known. Only plain values are read"),
    ("a: &x [1, *x]\n", 1, "contains itself"),
    ("b: 1\na: {<<: x}\n", 2, "`<<` takes a mapping"),
    ("b: 1\na: {<<: [{c: 1}, 2]}\n", 2, "`<<` takes a mapping"),
    ("b: 1\na: &x\n  <<: *x\n", 2, "contains itself"),
    ("a: &x {b: 1}\nc:\n  <<: *x\n  <<: {d: 1}\n", 4, "'<<' is here a second time; the first is in line 3"),
    ("? [1, 2]\n: 3\n", 1, "a key must be a name or a number"),
    ("a: 1\n---\nb: 2\n", 2, "found another document"),
    (f"a: [1]\nb: ${{a.{'9' * 5000}}}\n", 2, "refers to nothing"),
    ("a: 1\nb: ${b}\n", 2, "the reference b -> b leads back to itself"),
    ("a: ${b}\nb: ${c}\nc: ${a}\n", 1, "the reference b -> c -> a -> b leads back to itself"),
    ("a: {x: '${a}'}\n", 1, "leads back to itself"),
    ("a: ${bb.c}\nbb: {d: 1}\n", 1, "${bb.c} refers to nothing. Did you mean 'bb.d'?"),
    ("a: 1\nb: ${env:NOT_THERE_}\n", 2, "the environment has no variable 'NOT_THERE_'"),
])  # fmt: skip
def test_yaml_error_reports_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path}/a.yaml:{line}: ") and words in str(caught.value)


def chain(first: str, form: str, count: int) -> str:
    """Return names of which each has the one before in it, at the places of X."""
    lines = (f"a{number}: &a{number} {form}".replace("X", f"a{number - 1}") for number in range(1, count))
    return "\n".join([f"a0: &a0 {first}", *lines])


@pytest.mark.parametrize(("text", "words"), [
    *((text, r"a\.yaml: the file is empty. It needs at least `trainer:`") for text in ("", "\n\n", "# a comment\n")),
    (chain("[x, x, x, x, x, x, x, x, x, x]", f"[{', '.join(['*X'] * 10)}]", 40), "too many"),
    (chain("{q: 1}", f"{{<<: [{', '.join(['*X'] * 10)}]}}", 40), "too many"),
    *((f"a: {'[' * depth}{']' * depth}\n", "nested too deep") for depth in (200, 1100)),
    ("".join(f"{' ' * number}a:\n" for number in range(150)), "nested too deep"),
    *((f"a: {number}\n", r"a.yaml:1: 1\d+\.\.\. is too large") for number in ("1" * 5000, 2**64)),
    (chain("b", "['${X}', '${X}']", 44), r"a.yaml:\d+: references lead to too many"),
    (chain("b", "'${X}${X}'", 44), r"a.yaml:\d+: references (lead to too many|make a text of more)"),
    (chain("b", "'${X}'", 400), r"a.yaml:\d+: references lead to too many"),
])  # fmt: skip
def test_yaml_rejects_empty_and_excessive_files(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        resolved(tmp_path, text)


def test_yaml_rejects_unreadable_files_and_deep_words(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    for name in ("nothing.yaml", ".", "latin.yaml"):
        with pytest.raises(ConfigError, match="cannot be read as a configuration"):
            read(tmp_path / name)
    with pytest.raises(ConfigError, match="nested too deep"):
        parse_value("[" * 1100, SourceLocation("--a"))
    assert read(written(tmp_path, f"a: {2**64 - 1}\n")).values == {"a": 2**64 - 1}


def test_references_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_RATE", "1e-3")
    text = (
        "vars: {n: 3, name: run, deep: '${vars.n}'}\n"
        "trainer:\n  a: ${vars.n}\n  b: runs/${vars.name}-${vars.n}\n  c: ['${vars.deep}', '${trainer.d.0}']\n"
        "  d: [7]\n  e: ${env:SOME_RATE}\n  f: ${env:NOT_THERE_,5}\n  g: ${trainer.d}\n"
        "  h: {class_path: a.B, init_args: {width: 3}}\n  i: ${trainer.h.width}\n"
    )
    values = resolved(tmp_path, text)["trainer"]
    assert values.pop("h") == {"class_path": "a.B", "init_args": {"width": 3}}
    assert values == {"a": 3, "b": "runs/run-3", "c": [3, 7], "d": [7], "e": 1e-3, "f": 5, "g": [7], "i": 3}


def test_merge_joins_mappings(tmp_path: Path) -> None:
    tree = read(written(tmp_path, "a: {b: 1, c: [1, 2]}\nd: {class_path: X, init_args: {p: 1}}\ne: 1\n"))
    tree.merge(read(written(tmp_path, "a: {c: [3]}\nd: {class_path: Y, init_args: {q: 2}}\n", "b.yaml")))
    assert tree.values == {"a": {"b": 1, "c": [3]}, "d": {"class_path": "Y", "init_args": {"q": 2}}, "e": 1}
    assert str(tree.location(("a", "c"))).endswith("b.yaml:1") and str(tree.location(("e",))).endswith("a.yaml:3")


def overridden(word: str, text: str | None) -> dict[str, Any]:
    trainer = {"epochs": 1, "callbacks": [copy.deepcopy(PART)], "sizes": {0: 64}, "loss_fn": "my.loss"}
    tree = Tree({"trainer": trainer}, {})
    tree.override(word, text, SourceLocation(f"--{word}"))
    return tree.values["trainer"]


PART = {"class_path": "A", "init_args": {"p": 1}}


@pytest.mark.parametrize(("word", "text", "value"), [
    ("trainer.epochs", "3", 3), ("trainer.epochs", None, ...), ("trainer.new.x", "a", {"x": "a"}),
    ("trainer.callbacks.0.p", "2", [{"class_path": "A", "init_args": {"p": 2}}]),
    ("trainer.callbacks.0.init_args.q", "2", [{"class_path": "A", "init_args": {"p": 1, "q": 2}}]),
    ("trainer.callbacks.1.class_path", "B", [PART, {"class_path": "B"}]),
    ("trainer.callbacks.0", None, []), ("trainer.callbacks", "[]", []),
    ("trainer.algorithms.0.class_path", "EMA", [{"class_path": "EMA"}]), ("trainer.algorithms.0", "EMA", ["EMA"]),
    ("trainer.loggers.0.init_args.x", "1", [{"init_args": {"x": 1}}]), ("trainer.sizes.0", "32", {0: 32}),
    ("trainer.loss_fn.weight", "2", {"class_path": "my.loss", "init_args": {"weight": 2}}),
    ("trainer.class_path", "HFTrainer", "HFTrainer"),
])  # fmt: skip
def test_override_changes_one_value(word: str, text: str | None, value: Any) -> None:
    assert overridden(word, text).get(word.split(".")[1], ...) == value


def test_override_changes_trainer_class(tmp_path: Path) -> None:
    tree = read(written(tmp_path, "trainer:\n  epochs: 1\n  model: {class_path: A}\n"))
    for word, text in (("trainer", "HFTrainer"), ("trainer.model", "B")):
        tree.override(word, text, SourceLocation(f"--{word}"))
        assert str(tree.location((*word.split("."), "class_path"))) == f"--{word}"
    assert str(tree.location(("trainer", "epochs"))).endswith("a.yaml:2")


@pytest.mark.parametrize(("word", "text", "words"), [
    ("trainer.callbacks.5.p", "1", "'5' is not a position"),
    ("trainer.callbacks.p", "1", "'p' is not a position"),
    ("trainer.algorithms.1.class_path", "EMA", "goes into a list of 0, where '1' is not a position"),
    ("trainer.algorithms.0", None, "there is no 'trainer.algorithms.0' to remove: the list has 0 entries."),
    ("trainer.epoch", None, "there is no 'trainer.epoch' to remove. Did you mean 'epochs'?"),
    ("trainer.callbacks.1", None, "there is no 'trainer.callbacks.1' to remove: the list has 1 entries."),
    ("trainer.epochs", "[1,", "this is not YAML"),
])  # fmt: skip
def test_override_rejects_wrong_word(word: str, text: str | None, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overridden(word, text)
    assert f"--{word}" in str(caught.value) and words in str(caught.value)
