"""The settings of a node, from its own operator, in a file that never leaves it. Reading it needs no torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedtail.data.arrays import BOOLEANS
from fedtail.deployment.asked_rounds import note_asked
from fedtail.deployment.audit_log import AUDIT, AuditLog
from fedtail.deployment.site import Site
from fedtail.experiment.values import convert_value, type_hints_by_name
from fedtail.reading import TOML_BYTES, read_text, short_text, toml_tables
from fedtail.secure.identity import Identity
from fedtail.secure.sparse_graph import CORRUPTED

if TYPE_CHECKING:
    from fedtail.data.population import Population
    from fedtail.deployment.data_budget import DataBudget
    from fedtail.deployment.node import Node
    from fedtail.deployment.policy import NodePolicy
    from fedtail.experiment.experiment import Experiment
    from fedtail.experiment.trust import Trust

WITNESS = "budget.head"      # in the node's folder: how far the record of its data's budget had come
WORDS = {"name": "name = \"hospital-3\"", "experiment": "experiment = \"experiment.toml\"", "data": "data = \"patients.parquet\""}


@dataclass(frozen=True)
class SettingsFile:
    """The file that a node's settings were read from, and what it said: a node that stays reads it once."""

    path: Path
    tables: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> SettingsFile:
        """The file at `path` as it is now; raises ValueError where there is none, and where it is not valid TOML."""
        if not path.is_file():
            raise ValueError(f"there is no file {path}. `fedtail deploy init` writes one to start from.")
        return cls(path, toml_tables(read_text(path, TOML_BYTES, "the settings of a node"), path.name))


@dataclass(frozen=True)
class NodeSettings:
    """The settings of a node, which its operator writes; paths are relative to the file's folder.

    `experiment` is this node's own copy of the experiment file: its model, and the parts it is willing to run. `data` is an
    `.npz` or `.parquet` file, a saved population, or a folder of LEAF files; `columns` names its arrays. With `keys` "name" the
    clients' keys are hashed with the node's name, so that nodes need not agree on them; with "data" they are those of a saved
    population, and must differ over all nodes. Models are evaluated on examples that are never trained on: a `test_share` of each
    client's, or those of a file `test`, whose clients are matched by name. What clients remember between rounds is stored for the
    last `trainings` trainings. Code that the experiment names and that is not fedtail's is imported only from the folders
    (relative to the file; "." is its own) and packages in `trust`.

    A row is revealed only in a sum over `minimum` nodes or more, and with `masked_only` nothing is answered without masks. Where
    each node shares masks with few others, this node refuses unless rows stay secret with a share of `corrupted` nodes on the
    server's side. With `identity`, the file of this node's secret key, and `pinned`, the public keys of all nodes as their
    operators gave them, only signed sums are answered, against a server that departs from the protocol with up to `colluding`
    other nodes. With `answer_after` every answer is sent that many seconds after its message came, or a multiple of it where
    computing takes longer, so that the time does not reveal who is in the tail; 0 answers at once.

    The file `policy` holds the limits that this node keeps (`NodePolicy`), without which it answers nothing. What its data have
    answered is recorded in the folder `budget`, by default the path of the data with ".budget" appended: nodes of several
    servers with the same data share it. With `tell_budget` the server is told in words what the data have answered so far.

    The folder comes from whoever runs the server, and its node.toml may say `trust`. So code in it is run only where the operator
    accepted these very files, or with `allow_code`, which a file cannot say: it is `--trust` of the commands.
    """

    folder: Path
    name: str
    experiment: str
    data: str
    columns: Mapping[str, Any] = field(default_factory=dict)
    minimum: int = 3
    masked_only: bool = True
    keys: str = "name"
    test: str = ""
    test_share: float = 0.0
    trainings: int = 3
    corrupted: float = CORRUPTED
    trust: Sequence[str] = ()
    identity: str = ""
    pinned: Sequence[str] = ()
    colluding: int = 0
    answer_after: float = 0.0
    policy: str = "policy.toml"
    budget: str = ""
    tell_budget: bool = False
    allow_code: bool = False
    source: SettingsFile | None = None      # what they were read from

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of range, for both of `test` and `test_share`, and for an incomplete identity.

        An identity is incomplete where only one of `identity` and `pinned` is given, or `colluding` without them.
        """
        if self.minimum < 2:
            raise ValueError(f"minimum must be at least 2 nodes, got {self.minimum}: the sum over one node is that node's.")
        if self.keys not in ("name", "data"):
            raise ValueError(f"keys must be name or data, got {short_text(repr(self.keys))}.")
        if not 0 <= self.test_share < 1:
            raise ValueError(f"test_share must be in [0, 1), got {self.test_share:g}. For a fifth of each client's examples "
                             "write 0.2.")
        if self.test and self.test_share:
            raise ValueError("test names a file of examples to evaluate on, and test_share takes them from data. Write one of "
                             "them.")
        if not 0 <= self.corrupted < 1:
            raise ValueError(f"corrupted must be in [0, 1), got {self.corrupted:g}. It is a share of the nodes.")
        if bool(self.identity) != bool(self.pinned) or (self.colluding and not self.identity):
            raise ValueError("a node that signs needs identity, the file of its own key, and pinned, the public keys of all "
                             "nodes; colluding is for nodes that sign. Write identity and pinned, or leave all three out.")
        if self.colluding < 0:
            raise ValueError(f"colluding must be 0 or more nodes, got {self.colluding}.")
        if not 0 <= self.answer_after < math.inf:
            raise ValueError(f"answer_after must be 0 or more seconds, got {self.answer_after:g}. 0 answers at once.")

    @classmethod
    def read(cls, path: str | Path) -> NodeSettings:
        """The settings in the TOML file at `path`, usually node.toml; `folder` becomes the folder of the file.

        Raises ValueError where there is no file, where a needed setting (name, experiment or data) is missing, and where a
        setting is unknown, of the wrong type or out of range; the text names the setting.
        """
        place = Path(path)
        source = SettingsFile.read(place.absolute())
        given, known = source.tables, {one.name for one in fields(cls)} - {"folder", "allow_code", "source"}
        for name in given:
            if name not in known:
                raise ValueError(f"{place.name} has no setting {name!r}. There are {', '.join(sorted(known))}.")
        for name, example in WORDS.items():
            if name not in given:
                raise ValueError(f"{place.name} does not say {name}. Write {example}.")
        hints = type_hints_by_name(cls)
        for name, value in given.items():
            problem, _ = convert_value(value, hints[name])
            if problem or (name == "columns" and not isinstance(value, dict)):
                raise ValueError(f"{place.name}: {name} must be {problem or 'a table'}, got {short_text(repr(value))}.")
        return cls(folder=place.resolve().parent, source=source, **given)

    def changed_settings(self) -> list[str]:
        """The names of the settings that are others in the file now than when these were read; [] where they are from no file.

        Raises ValueError where the file is missing or not valid now.
        """
        if self.source is None:
            return []
        was, now = self.source, NodeSettings.read(self.source.path).source
        assert now is not None
        return sorted(name for name in now.tables.keys() | was.tables.keys() if now.tables.get(name) != was.tables.get(name))

    @property
    def budget_folder(self) -> Path:
        """The folder with what this node's data have answered, over all runs and servers."""
        data = (self.folder / self.data).resolve()
        return self.folder / self.budget if self.budget else data.with_name(f"{data.name}.budget")

    def read_policy(self) -> NodePolicy:
        """The limits of this node; raises ValueError where the policy is missing or not valid."""
        from fedtail.deployment.policy import NodePolicy

        return NodePolicy.read(self.folder / self.policy)

    def data_budget(self) -> DataBudget:
        """The budget of this node's data by its policy, which is read anew for every round.

        Raises ValueError where the policy is missing or not valid.
        """
        from fedtail.deployment.data_budget import DataBudget

        return DataBudget(self.budget_folder, self.read_policy(), self.folder / WITNESS, self.read_policy)

    @property
    def audit_file(self) -> Path:
        """The file of this node's audit log."""
        return self.folder / AUDIT

    def audit_log(self) -> AuditLog:
        """This node's log of what it accepted, was asked, refused and answered."""
        return AuditLog(self.audit_file)

    def make_site(self, seed: int = 0) -> Site:
        """The `Site` that answers messages for this node; data and model are read only when a message first needs them.

        `seed` is for making the model. The file of the identity key is read here: ValueError where it is named and not valid.
        """
        return Site(lambda: self.make_node(seed), self.minimum, self.masked_only, self.own_identity(), corrupted=self.corrupted,
                    answer_after=self.answer_after, log=self.audit_log(), note=partial(note_asked, self.folder))

    def own_identity(self) -> Identity | None:
        """This node's identity: the secret key from the file `identity`, and the keys in `pinned`; None where no file is named.

        Raises ValueError where the file or a pinned key is not 64 hexadecimal digits.
        """
        if not self.identity:
            return None
        from fedtail.deployment.keys import parse_public_identity, read_identity

        secret = read_identity(self.folder / self.identity)
        return Identity(secret, tuple(map(parse_public_identity, self.pinned)), self.colluding)

    def read_population(self) -> Population:
        """The clients of this node with the examples they train on, read from `data` anew at each call."""
        return self.read_splits()[0]

    def read_splits(self) -> tuple[Population, Population | None]:
        """The pair (train, test): this node's clients with the examples they train on, and with those models are evaluated on.

        Test examples come from the file `test`, or are a random `test_share` of each client's examples in `data`. Where neither
        is set, test is None and clients train on all their examples. The files are read at each call. Clients have the keys here
        that the server is told, in both: by `keys` "name" hashed with the node's name, and only here.

        Raises ValueError where two clients have the same key, and where labels are text.
        """
        from fedtail.data.opening import open_any_data
        from fedtail.deployment.client_keys import check_distinct_keys, with_own_keys

        whole = _without_text_labels(open_any_data(self.folder / self.data, **self.columns), self.data)
        check_distinct_keys(whole, self.data)
        if self.keys == "name":                               # before anything is drawn by them
            whole = with_own_keys(whole, self.name)
        if self.test:
            test = _without_text_labels(open_any_data(self.folder / self.test, **self.columns), self.test)
            return whole, _match_clients_by_name(test, whole)
        return whole.split_examples(within=self.test_share) if self.test_share else (whole, None)

    def data_state(self) -> bytes:
        """A digest (32 bytes) of the sizes and times of the files of data, which changes with them; nothing of them is read."""
        found = []
        for name in filter(None, (self.data, self.test)):
            place = self.folder / name
            files = sorted(one for one in place.rglob("*") if one.is_file()) if place.is_dir() else [place]
            found += [(name, one.name, (kept := one.stat()).st_size, kept.st_mtime_ns) for one in files]
        return hashlib.sha256(repr(found).encode()).digest()

    def read_experiments(self) -> list[Experiment]:
        """The experiments of this node's own file, one for each method; code is imported only from what `trust` lists.

        Raises Refused, before any of it is imported, where the operator has not accepted that code.
        """
        from fedtail.deployment.deployed_experiment import deployed_experiments

        return deployed_experiments(self.folder / self.experiment, trust=self.allowed_code())

    def allowed_code(self) -> Trust:
        """What `trust` lists; raises Refused where it lists anything and the operator has not accepted it as it is now."""
        from fedtail.deployment.consent import check_code
        from fedtail.experiment.trust import Trust

        if self.trust and not self.allow_code:
            check_code(self)
        return Trust.from_names(self.trust, self.folder)

    def make_node(self, seed: int) -> Node:
        """A `Node`, the part that computes: this node's data, and the model and parts of its own experiment file.

        It answers the questions of that file and no others, once its operator has accepted them. `seed` is for making the model.
        Code that is not fedtail's is imported only from what `trust` lists. The clients' memory is kept in the folder `memory`
        beside the settings.
        """
        from fedtail.deployment.agreement import Agreement
        from fedtail.deployment.consent import Consent
        from fedtail.deployment.deployed_experiment import agreed_channel
        from fedtail.deployment.node import Node
        from fedtail.deployment.parts import user_parts

        experiments = self.read_experiments()
        own = {part.__name__: part for one in experiments for part in user_parts(one.algorithm)}
        population, test = self.read_splits()
        return Node(population, experiments[0].task.make(seed), parts=own.values(), workers=1, folder=self.folder / "memory",
                    test=test, trainings=self.trainings,
                    agreements=[Agreement(one.algorithm, one.evaluate.on_nodes, agreed_channel(one)) for one in experiments],
                    budget=self.data_budget(), consent=Consent.of(self, experiments), log=self.audit_log(),
                    data_state=self.data_state())


def _without_text_labels(population: Population, file: str) -> Population:
    """The population; raises ValueError where labels were text, which one node alone cannot number as the others do."""
    if population.classes in (None, BOOLEANS):
        return population
    raise ValueError(f"y of {file} holds the names {', '.join((population.classes or ())[:3])}: every node must number classes "
                     "alike, and this one may not have them all. Number them from 0 on every node.")


def _match_clients_by_name(test: Population, clients: Population) -> Population:
    """The clients of `test` whose names occur in `clients`, in the order of `test`, with the keys that they have in `clients`.

    Raises ValueError where either population has no names, or no name occurs in both.
    """
    if test.names is None or clients.names is None:
        raise ValueError("the clients of test are found by their names, which a population without names does not have. Save "
                         "both with names, or write test_share.")
    place = {name: k for k, name in enumerate(clients.names.tolist())}
    known = [k for k, name in enumerate(test.names.tolist()) if name in place]
    if not known:
        raise ValueError(f"no client of test is among those of data: {test.names[0]!r}, say, is not.")
    found = test.select(known)
    return replace(found, key=clients.key[[place[name] for name in test.names[known].tolist()]])
