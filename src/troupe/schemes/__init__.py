"""The coordination schemes, by name. To add one: one file, one line here."""

from __future__ import annotations

from troupe.schemes.actor_learner import ActorLearner
from troupe.schemes.local import Local
from troupe.schemes.scheme import Scheme

SCHEMES: dict[str, type[Scheme]] = {"local": Local, "actor-learner": ActorLearner}
