"""Random token ids as text where there is no tokenizer: one common English word an id."""

from __future__ import annotations

from collections.abc import Iterable

# Each is one token, with the space before it, in the vocabularies of the common model families.
_WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city community name "
    "president team minute idea kid body information back parent face others level office door health person "
    "art war history party result change morning reason research girl guy moment air teacher force education "
    "foot boy age policy music market sense nation plan college interest death experience effect use class "
    "control care field development role effort rate heart drug show leader light voice wife police mind "
    "price report decision son view relationship town road arm difference value building action season "
    "society tax director position player record paper space ground form event official matter center couple "
    "site project activity star table need court American oil situation cost industry figure street image "
    "phone data picture practice piece land product doctor wall patient worker news test movie north love"
).split()


class WordText:
    """Turns ids into text: equal ids give equal words, so that shared beginnings stay shared."""

    def __call__(self, ids: Iterable[int]) -> str:
        return " ".join(_WORDS[token % len(_WORDS)] for token in ids)
