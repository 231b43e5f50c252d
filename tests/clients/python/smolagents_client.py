"""smolagents: a model over OpenAI's API, whole and streamed, and an agent that calls tools."""

# /// script
# dependencies = ["smolagents[openai]==1.26.0"]
# ///

import os

from smolagents import ChatMessage, MessageRole, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(
    model_id="pocket",
    api_base=os.environ["RUNTIME_URL"] + "/v1",
    api_key="none",
    temperature=0,
    max_tokens=100,
)
count = [ChatMessage(role=MessageRole.USER, content="Count from 1 to 5.")]
assert model.generate(count).content == "1, 2, 3, 4, 5"
assert "".join(delta.content or "" for delta in model.generate_stream(count)) == "1, 2, 3, 4, 5"
print("ok: generate, generate_stream")

asked: list[str] = []


@tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The name of the city.
    """
    asked.append(city)
    return "21 degrees, clear"


message = model.generate(
    [ChatMessage(role=MessageRole.USER, content="What is the weather in Oslo?")],
    tools_to_call_from=[get_weather],
    stop_sequences=["Observation:"],
)
assert message.tool_calls and message.tool_calls[0].function.name == "get_weather"
print("ok: tools_to_call_from with tool_choice required")

# a prompt that pocket's context has room for; the agent demands a call in each step
agent = ToolCallingAgent(
    tools=[get_weather], model=model, instructions="Be brief.", max_steps=2, verbosity_level=0
)
agent.prompt_templates["system_prompt"] = "You call tools."
agent.run("What is the weather in Oslo?")
assert agent.memory.steps
print("ok: ToolCallingAgent")
