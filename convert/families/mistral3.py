"""Mistral Small 3.1, 3.2 and 4, Devstral, Magistral, Ministral 3: one of three text models beside a vision tower."""

import dataclasses

from convert.families.ministral3 import MINISTRAL3
from convert.families.mistral import MISTRAL
from convert.families.mistral4 import MISTRAL4
from convert.families.vision_tower import by_file

_TEXTS = {text.model_type: by_file(text, "mistral3") for text in (MISTRAL, MINISTRAL3, MISTRAL4)}
MISTRAL3 = dataclasses.replace(_TEXTS["mistral"], texts=_TEXTS)
