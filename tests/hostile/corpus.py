"""The corpus of hostile requests, as data: what each sends and what it must get.

A case is a request that a client may send with bad intent or by mistake. It is answered with one of `status`,
and an error names the field `param` where one is given. No case changes what other clients get, so all of
them can run next to others, in any order and at once.
"""

from tests.hostile.corpus_bodies import SHAPES, VALUES
from tests.hostile.corpus_expressions import EXPRESSIONS
from tests.hostile.corpus_heads import ADMINS, HEADERS, KEYS
from tests.hostile.corpus_injections import INJECTIONS

CORPUS = (*SHAPES, *VALUES, *INJECTIONS, *HEADERS, *KEYS, *ADMINS, *EXPRESSIONS)
