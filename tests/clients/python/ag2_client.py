"""AG2: a conversation of two agents, one of which calls a function."""

# /// script
# dependencies = ["ag2[openai]==VERSION"]
# ///

import os

from autogen import ConversableAgent, LLMConfig, register_function

config = LLMConfig(
    {
        "model": "pocket",
        "base_url": os.environ["RUNTIME_URL"] + "/v1",
        "api_key": "none",
        "price": [0, 0],
        "temperature": 0,
        "max_tokens": 100,
    }
)
asked: list[str] = []


def get_weather(city: str) -> str:
    """The weather in a city."""
    asked.append(city)
    return "21 degrees, clear"


helper = ConversableAgent("helper", llm_config=config, human_input_mode="NEVER", system_message="Be brief.")
user = ConversableAgent("user", llm_config=False, human_input_mode="NEVER")
register_function(get_weather, caller=helper, executor=user, description="The weather in a city.")
result = user.initiate_chat(helper, message="What is the weather in Oslo?", max_turns=2, silent=True)
assert asked == ["Oslo"] and result.chat_history[-1]["content"]
print("initiate_chat with a function")
