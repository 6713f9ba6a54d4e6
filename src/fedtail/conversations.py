"""How server code asks: a conversation yields questions, is sent the sums of their rows, and returns its result."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from fedtail.questions import Question

T = TypeVar("T")
Conversation = Generator[Any, Any, T]      # yields questions, is sent sums, ends in a T


@dataclass(frozen=True)
class Joint:
    """Several questions, which may be joint ones themselves, in one message; it is answered by a tuple of their answers."""

    questions: tuple[Any, ...]


def with_question_fields(conversation: Conversation[T], **fields: Any) -> Conversation[T]:
    """The given conversation with these fields replaced in every question it yields, joint ones too; its result is the same.

    `model=1` makes all questions about the second broadcast model; `objective=...` sets the part that computes a client's loss.
    """
    return with_changed_questions(conversation, lambda question: replace(question, **fields))


def with_changed_questions(conversation: Conversation[T], change: Callable[[Any], Any]) -> Conversation[T]:
    """The given conversation with `change(question)` in place of every single question it yields; its result is the same.

    In a joint question all its single questions are changed. An exception that is thrown into it, as by `converse`, is raised in
    the given conversation, at its question.
    """
    try:
        question = next(conversation)
        while True:
            try:
                reply = yield change_question(question, change)
            except Exception as reason:
                question = conversation.throw(reason)
            else:
                question = conversation.send(reply)
    except StopIteration as end:
        return end.value


def replace_fields(question: Any, **fields: Any) -> Any:
    """A copy of a question with these fields replaced; in a joint question, those of all its single questions are."""
    return change_question(question, lambda one: replace(one, **fields))


def change_question(question: Any, change: Callable[[Any], Any]) -> Any:
    """`change(question)`; a joint question is copied with each of its single questions changed so."""
    if isinstance(question, Joint):
        return Joint(tuple(change_question(one, change) for one in question.questions))
    return change(question)


def single_questions(question: Any) -> Iterator[Question]:
    """Yields the single questions of a message in order, through nested joint questions; a single question yields itself."""
    if isinstance(question, Joint):
        for one in question.questions:
            yield from single_questions(one)
    else:
        yield question


def arrange_answers(question: Any, answers: Iterator[Tensor]) -> Any:
    """The answers to a message, nested as its questions are: one answer to a single question, a tuple of answers to a joint one.

    `answers` yields those to the single questions in order; as many as are needed are taken from it.
    """
    return tuple(arrange_answers(one, answers) for one in question.questions) if isinstance(question, Joint) else next(answers)


def converse(conversation: Conversation[T], ask: Callable[[Any], Any]) -> T:
    """Hold a conversation to its end: pass each question it yields to `ask`, send it the sums that come back, return its result.

    An exception of `ask` is raised within the conversation, at its question; if it is not caught there, it comes out of here.
    """
    try:
        question = next(conversation)
        while True:
            try:
                sums = ask(question)
            except Exception as reason:
                question = conversation.throw(reason)
            else:
                question = conversation.send(sums)
    except StopIteration as end:
        return end.value


def join_conversations(conversations: list[Conversation[T]]) -> Conversation[list[T]]:
    """Several conversations as one: each `Joint` that it yields holds the next question of every one that has not ended.

    It is sent a tuple of sums for each, takes as many messages as the longest of them, and returns the list of their results in
    order. An exception that is thrown into it is raised in every conversation that waits for an answer, at its question; the
    first that does not catch it ends all of them.
    """
    results: dict[int, T] = {}
    waiting: dict[int, Any] = {}

    def resume(k: int, step: Callable[[], Any]) -> None:
        """Run conversation `k` up to its next question, which then waits, or to its end, whose result is stored."""
        try:
            waiting[k] = step()
        except StopIteration as end:
            results[k] = end.value

    for k, conversation in enumerate(conversations):
        resume(k, partial(next, conversation))
    while waiting:
        asked = dict(waiting)
        waiting.clear()
        try:
            sums = yield Joint(tuple(asked.values()))
        except Exception as reason:
            for k in asked:
                resume(k, partial(conversations[k].throw, reason))
        else:
            for k, reply in zip(asked, sums, strict=True):
                resume(k, partial(conversations[k].send, reply))
    return [results[k] for k in range(len(conversations))]
