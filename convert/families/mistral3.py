"""Mistral Small 3.1 and 3.2, Devstral, Magistral, Ministral 3: Mistral, or Ministral 3, beside a vision tower."""

import dataclasses

from convert.families.ministral3 import MINISTRAL3
from convert.families.mistral import MISTRAL
from convert.families.vision_tower import beside_a_tower

_TEXTS = {text.model_type: beside_a_tower(text, "mistral3") for text in (MISTRAL, MINISTRAL3)}
MISTRAL3 = dataclasses.replace(_TEXTS["mistral"], texts=_TEXTS)
