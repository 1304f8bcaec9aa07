"""The coordination schemes, by name. To add one: one file, one line here."""

from __future__ import annotations

from troupe.schemes.actor_learner import ActorLearner
from troupe.schemes.all_reduce import AllReduce
from troupe.schemes.local import Local
from troupe.schemes.parameter_server import ParameterServer
from troupe.schemes.scheme import Scheme
from troupe.schemes.shared_memory import Hogwild, Locked

SCHEMES: dict[str, type[Scheme]] = {
    "local": Local,
    "actor-learner": ActorLearner,
    "locked": Locked,
    "hogwild": Hogwild,
    "parameter-server": ParameterServer,
    "all-reduce": AllReduce,
}
