"""Which questions belong to the experiment that a node's operator accepted: every other one is refused by the node itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fedtail.algorithm import FederatedAlgorithm, Method, parts_are_equal
from fedtail.base_part import classes_sent, classes_sent_with
from fedtail.channel import SecureChannel
from fedtail.channel.base import Channel, clients_add_noise
from fedtail.evaluation.federated import FederatedEvaluation
from fedtail.privacy.mechanisms import Mechanism, NoPrivacy
from fedtail.questions import Count, Evaluate, Statistic, Train
from fedtail.sampling import ByMass, BySize, Cohort, EqualClients
from fedtail.secure.encoding import Refused

BY_DRAWS = (ByMass, BySize, EqualClients)      # samplers by which a client's mass is multiplied by other factors than 1


@dataclass(frozen=True)
class Agreement:
    """What the accepted experiment asks of a node over `channel`: the parts of `method`, of `evaluation` if clients evaluate.

    A question of it holds these parts as they stand in the node's own file. Left to the server are the numbers that it finds in
    the course of a run (a dual, thresholds to try, what an aggregator kept), and parts of the classes that an agreed part
    declares in `sends`, where no mechanism is among them.
    """

    method: Method
    evaluation: FederatedEvaluation | None = None
    channel: Channel = SecureChannel(threshold=2)      # whose encodings its answers may have

    def check_cohort(self, cohort: Cohort, mass: Tensor, key: Tensor) -> None:
        """Raise Refused unless each client of `cohort` is in it once, with its key and the factor that the agreed sampler gives.

        `mass` and `key` (clients,) are those of all clients of the node: draws that decide who contributes follow from keys. The
        factor is 1, or with a sampler by which each draw contributes
        once a whole number of draws over the mass. The mass bound must cover them all.
        """
        ids, factor = cohort.ids, cohort.importance
        once = len(ids.unique()) == len(cohort.key.unique()) == len(ids)
        if not once or not bool(((ids >= 0) & (ids < len(mass))).all()):
            raise Refused("a cohort names a client twice, or one that is not here.")
        if factor.shape != ids.shape or len(cohort.key) != len(ids):
            raise Refused("a cohort needs a key and a factor for each client.")
        if not torch.equal(cohort.key, key[ids]):
            raise Refused("a cohort names a client by a key that is not its own.")
        own = mass[ids].double() * factor
        fits = factor == 1
        if any(isinstance(one, BY_DRAWS) for one in parts_within(self.method.sample)):
            fits |= (own.round() >= 1) & ((own - own.round()).abs() <= 1e-9 * own)
        if not bool(fits.all()):
            raise Refused(f"a client's mass would be multiplied by {float(factor[~fits][0]):.3g}, which "
                          f"{type(self.method.sample).__name__} of the accepted experiment does not do.")
        if len(ids) and not cohort.mass_bound >= float(own.max()):
            raise Refused(f"the mass bound {cohort.mass_bound:.3g} is below the mass of a client.")

    def check_ask(self, questions: Sequence[Any], encoding: Any, cohort: Cohort, total: int) -> None:
        """Raise Refused where the accepted experiment does not ask one of `questions`, or not with answers in this `encoding`.

        `cohort` is this node's part of a cohort of `total` clients in all. An encoding that the experiment's channel does not
        make is another question, to which clients would add fresh noise.
        """
        agreed = self.channel.encoding(total, cohort.mass_bound)
        if encoding != agreed:
            raise Refused(f"answers would be encoded as {_encoding_text(encoding)}, and the accepted experiment encodes them as "
                          f"{_encoding_text(agreed)}: {len(cohort.ids)} of the round's clients are here.")
        for one in questions:
            self.check_question(one, total)

    def check_question(self, question: Any, cohort_size: int) -> None:
        """Raise Refused where the accepted experiment does not ask `question` of a cohort of `cohort_size` clients.

        The text names the part that differs.
        """
        if isinstance(question, Count):
            counted = question.question
            if not isinstance(counted, (Train, Evaluate)) or counted.model != question.model or question.gather:
                raise Refused("a count is not about the sum of a question of the accepted experiment.")
            if counted.mechanism.private:
                raise Refused(f"{counted.name} has noise, and clients are counted for sums without noise only.")
            self.check_question(counted, cohort_size)
        elif isinstance(question, Train):
            self._check_training(question, self._member(question.model), cohort_size)
        elif isinstance(question, Statistic):
            self._check_statistic(question, self._member(question.model), cohort_size)
        elif isinstance(question, Evaluate):
            self._check_evaluation(question)
        else:
            raise Refused(f"the accepted experiment asks no {type(question).__name__}.")

    def _member(self, model: int) -> FederatedAlgorithm:
        """The method that trains model number `model`; raises Refused where the accepted experiment trains fewer."""
        if model not in range(len(self.method.members)):
            raise Refused(f"model {model} is asked about, and the accepted experiment trains {len(self.method.members)}.")
        return self.method.members[model]

    def _check_training(self, question: Train, member: FederatedAlgorithm, cohort_size: int) -> None:
        """Raise Refused unless the parts of a question to train are those of `member`, prepared for such a cohort."""
        _refuse_other("aggregate", member.aggregate, question.aggregate)
        _refuse_other("risk", member.risk.for_cohort(cohort_size), question.risk)
        _refuse_other("the objective of local training", member.local.objective, question.objective)
        if question.personal is not None:
            _refuse_other("personal", member.personal, question.personal)
        if question.marks_contributors or not member.local.declares.mean_updates:
            fits = is_prepared(member.local, question.local)
        else:
            fits = type(question.local) in set(classes_sent(member.local))
        if not fits:
            raise Refused(_differs("local", member.local, question.local))
        if not question.marks_contributors and not member.local.declares.mean_updates:
            raise Refused("updates are asked for that train no model, and the accepted experiment has none.")
        if question.divisor is not None and (question.divisor != 0 or question.mechanism.private):
            raise Refused(f"entry {question.divisor} of the sum is named as the weight that others are divided by, which no "
                          "aggregator does where clients add noise, and none does of another entry than the first.")
        if question.gather and not member.aggregate.declares.gathers:
            raise Refused(f"single updates are asked for, and {type(member.aggregate).__name__} of the accepted experiment needs "
                          "their sum only.")

    def _check_statistic(self, question: Statistic, member: FederatedAlgorithm, cohort_size: int) -> None:
        """Raise Refused unless a question about losses is one of a part of `member`, with the mechanism of that part."""
        risk = member.risk.for_cohort(cohort_size)
        about_risk, about_local = asks_statistic(risk, question.part), asks_statistic(member.local, question.part)
        if not about_risk and not about_local:
            raise Refused(f"{type(question.part).__name__} is asked about the losses, which neither risk nor local training of "
                          "the accepted experiment asks.")
        mechanism: Mechanism = risk.declares.mechanism if about_risk else NoPrivacy()
        _refuse_other("the noise on what is told of the losses", mechanism, question.mechanism)
        _refuse_other("the objective of local training", member.local.objective, question.objective)
        if question.gather:
            raise Refused("single clients' losses are asked for, and the accepted experiment needs their sums only.")

    def _check_evaluation(self, question: Evaluate) -> None:
        """Raise Refused unless the accepted experiment has clients evaluate so, with this mechanism."""
        if self.evaluation is None:
            raise Refused("an evaluation is asked for, and in the accepted experiment clients evaluate nothing.")
        agreed = (self.evaluation.client_half, *self.evaluation.personal_halves(self.method).values())
        if not any(parts_are_equal(one, question.part) for one in agreed):
            raise Refused(f"an evaluation by {question.name} is asked for that the accepted experiment does not have.")
        _refuse_other("the noise on evaluations", self.evaluation.mechanism, question.mechanism)
        if question.gather:
            raise Refused("single clients' evaluations are asked for, and the accepted experiment needs their sums only.")


def first_agreeing(agreements: Sequence[Agreement], check: Callable[[Agreement], None]) -> None:
    """Raise Refused, with the reason of the first, where `check` raises it for each of `agreements`."""
    refused = []
    for one in agreements:
        try:
            return check(one)
        except Refused as why:
            refused.append(why)
    raise refused[0]


def check_shares_of_noise(questions: Sequence[Any], members: Tensor | None, summed: tuple[Iterable[int], int] | None) -> None:
    """Raise Refused where a sum of `questions` may hold fewer shares of the clients' noise than is charged for.

    `members`, (nodes, 2), has the nodes of the round with their clients; `summed` the nodes whose rows are asked for and the
    fewest of them that the sum may be over, None where that is not known. Whoever departs from the protocol leaves out the nodes
    with most clients.
    """
    shares = max((one.mechanism.minimum for one in questions if clients_add_noise(one.mechanism)), default=0)
    if not shares:
        return
    if members is None or summed is None:
        raise Refused("clients add noise, and it is not known over how many nodes the sum is.")
    asked, fewest = summed
    held = sorted(count for node, count in members.tolist() if node in set(asked))[:fewest]
    if len(held) < fewest or sum(held) < shares:
        raise Refused(f"a sum over {fewest} nodes may hold the noise of {sum(held)} clients, and what is charged relies on "
                      f"{shares}.")


def check_members(members: Tensor | None, here: int, number: int | None) -> None:
    """Raise Refused unless `members`, (nodes, 2), names each node of a round once with its clients, and this one with `here`.

    Masks are bound to it: a server that tells other nodes of another cohort gets a sum whose masks stay. `number` is that of this
    node; None: some node must have so many clients.
    """
    if members is None:
        raise Refused("a round begins without the number of clients at each node. Is the server of an older version?")
    fits = members.dtype == torch.int64 and members.ndim == 2 and members.shape[1] == 2 and bool((members[:, 1] > 0).all())
    if not fits or not bool((members[1:, 0] > members[:-1, 0]).all()):
        raise Refused("a round needs each of its nodes once, in order, and a number of clients for each.")
    mine = members[:, 1] if number is None else members[members[:, 0] == number, 1]
    if here not in mine.tolist():
        raise Refused(f"this node has {here} clients in the round, and the others are told of another number.")


def asks_statistic(part: Any, asked: Any) -> bool:
    """Whether `asked`, a part that computes a row from losses, is `part`, a part in it, or of a class that one of them sends."""
    own = list(parts_within(part))
    return any(parts_are_equal(one, asked) for one in own) or any(
        type(asked) in tuple(classes_sent_with(type(one)))[1:] for one in own)


def is_prepared(agreed: Any, asked: Any) -> bool:
    """Whether `asked` is the part `agreed`, or what it becomes when a round is prepared.

    It is where the class is the same and each field is so in turn, or where the class of `agreed` declares that of `asked` in
    its `sends`: what such a part holds is found in the course of the run.
    """
    if type(agreed) is not type(asked):
        return type(asked) in tuple(classes_sent_with(type(agreed)))[1:]
    if not is_dataclass(agreed):
        return parts_are_equal(agreed, asked)
    return all(is_prepared(getattr(agreed, one.name), getattr(asked, one.name)) for one in fields(agreed))


def parts_within(part: Any) -> Iterator[Any]:
    """Yields the part, the parts in its fields, those in theirs, and so on; within tuples and lists too."""
    if isinstance(part, (tuple, list)):
        for one in part:
            yield from parts_within(one)
    elif is_dataclass(part) and not isinstance(part, type):
        yield part
        for one in fields(part):
            yield from parts_within(getattr(part, one.name))


def _refuse_other(name: str, agreed: Any, asked: Any) -> None:
    """Raise Refused where the part `asked` is not equal to the `agreed` one, which the text calls `name`."""
    if not parts_are_equal(agreed, asked):
        raise Refused(_differs(name, agreed, asked))


def _encoding_text(encoding: Any) -> str:
    """An encoding in words: its class, the clients and the mass it is for, and the bits of its modulus."""
    modulus = "" if encoding.modulus_bits is None else f" modulo 2^{encoding.modulus_bits}"
    return f"{type(encoding).__name__}{modulus} for {encoding.clients} clients of mass {encoding.mass:.3g}"


def _differs(name: str, agreed: Any, asked: Any) -> str:
    """A sentence about a part that is not the agreed one: its name, the classes, and the first field that differs."""
    if type(agreed) is not type(asked):
        return f"{name}: {type(asked).__name__} is asked for, and the accepted experiment has {type(agreed).__name__}."
    other = [one.name for one in fields(agreed) if not parts_are_equal(getattr(agreed, one.name), getattr(asked, one.name))
             ] if is_dataclass(agreed) else []
    about = f" in {', '.join(other)}" if other else ""
    return f"{name}: the {type(asked).__name__} asked for differs from that of the accepted experiment{about}."
