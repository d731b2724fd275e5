"""Checks of answers, and what several libraries are asked for."""

import json
from typing import Literal, Optional

from pydantic import BaseModel

BLOCK_TOKENS = 16
# Enough for the random text of the simulated device, which takes long to end a string.
LIMIT = 8000
# A real model needs fewer tokens, and has a shorter context.
LIMIT_OF_MODEL = 600


class City(BaseModel):
    """A city."""

    name: str
    country: Literal["France", "Japan"]
    population: Optional[int]


WEATHER = {
    "name": "get_weather",
    "description": "Returns the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["location", "unit"],
        "additionalProperties": False,
    },
}


def valid(answer):
    """Checks that an answer, an event or a list of events has all fields that its type in the SDK requires, and that they have the types
    which the SDK documents. The SDKs do not check this themselves. Returns its argument."""
    for each in answer if isinstance(answer, list) else [answer]:
        type(each).model_validate(each.to_dict())
    return answer


def whole_blocks(prompt_tokens):
    """Returns the number of tokens of a repeated prompt that a cache can have: full blocks, and never the last token."""
    return (prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def weather_arguments(text):
    """Parses the arguments of a call of `get_weather`, and checks them against its schema."""
    arguments = json.loads(text)
    assert set(arguments) == {"location", "unit"} and arguments["unit"] in ("celsius", "fahrenheit"), arguments
    assert isinstance(arguments["location"], str) and len(arguments["location"]) <= 20, arguments
    return arguments
