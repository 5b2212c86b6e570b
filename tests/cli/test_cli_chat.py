"""``hardpoint chat`` over piped standard input."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_support import CommandLine, Finished
from tiny_llama import write_tiny_llama

HINT = "/reset starts over, /quit"


def chat(hardpoint: CommandLine, model: Path, *lines: str, options: tuple[object, ...] = ()) -> Finished:
    common = ["--temperature", 0, "--ignore-eos", "--max-tokens", 6]
    return hardpoint("chat", model, *common, *options, stdin="".join(f"{line}\n" for line in lines))


def answers(done: Finished) -> list[str]:
    assert done.status == 0, done.err
    return done.out.split("\n")[:-1]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seed whose greedy answers below hold no line break, so that a line is an answer."""
    return write_tiny_llama(tmp_path_factory.mktemp("speaker") / "tiny", seed=3)


def test_every_line_is_answered_on_standard_output(hardpoint: CommandLine, speaker: Path) -> None:
    done = chat(hardpoint, speaker, "Hello", "How are you?")
    assert len(answers(done)) == 2
    assert HINT in done.err
    assert "> " not in done.out, "no prompt where nobody types"


def test_the_conversation_grows_and_reset_forgets_it(hardpoint: CommandLine, speaker: Path) -> None:
    first, second = answers(chat(hardpoint, speaker, "Hello", "Hello"))
    assert first != second, "the second answer has seen the first"
    done = chat(hardpoint, speaker, "Hello", "/reset", "Hello")
    assert answers(done) == [first, first]
    assert "(new conversation)" in done.err


@pytest.mark.slow
def test_quit_and_the_end_of_input_both_leave(hardpoint: CommandLine, speaker: Path) -> None:
    assert len(answers(chat(hardpoint, speaker, "Hello", "/quit", "never asked"))) == 1
    assert answers(chat(hardpoint, speaker)) == []


@pytest.mark.slow
def test_an_unknown_command_is_explained_and_never_reaches_the_model(hardpoint: CommandLine, speaker: Path) -> None:
    done = chat(hardpoint, speaker, "/help", "hello", "/quit now", "never read")
    assert len(answers(done)) == 1
    assert "unknown command /help. Type a message." in done.err


@pytest.mark.slow
def test_empty_lines_are_no_turns(hardpoint: CommandLine, speaker: Path) -> None:
    assert len(answers(chat(hardpoint, speaker, "", "   ", "Hello", ""))) == 1


@pytest.mark.slow
def test_a_system_message_changes_the_answer_and_survives_reset(hardpoint: CommandLine, speaker: Path) -> None:
    (plain,) = answers(chat(hardpoint, speaker, "Hello"))
    options = ("--system", "Answer like a mechanic.")
    first, again = answers(chat(hardpoint, speaker, "Hello", "/reset", "Hello", options=options))
    assert first == again != plain


@pytest.mark.slow
def test_a_turn_that_does_not_fit_is_explained_and_the_conversation_goes_on(
    hardpoint: CommandLine, speaker: Path
) -> None:
    done = chat(hardpoint, speaker, "x" * 600, "Hello")
    assert len(answers(done)) == 1
    assert "/reset starts over" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_a_model_without_a_template_says_so(hardpoint: CommandLine, tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "plain")
    (model / "tokenizer_config.json").unlink()
    done = chat(hardpoint, model, "Hello")
    assert "no chat template" in done.err
    assert done.out == ""
