"""CrewAI: an LLM, and a crew of one agent with one task."""

# /// script
# dependencies = ["crewai==1.15.30"]
# ///

import os

os.environ |= {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "OTEL_SDK_DISABLED": "true",
    "CREWAI_TRACING_ENABLED": "false",
}

from crewai import LLM, Agent, Crew, Task

model = LLM(
    model="openai/pocket",
    base_url=os.environ["RUNTIME_URL"] + "/v1",
    api_key="none",
    temperature=0,
    max_tokens=100,
)
assert model.call("Count from 1 to 5.") == "1, 2, 3, 4, 5"
agent = Agent(role="helper", goal="to help", backstory="You help.", llm=model, max_iter=2)
task = Task(description="Count from 1 to 5.", expected_output="numbers", agent=agent)
assert str(Crew(agents=[agent], tasks=[task]).kickoff())
print("ok: LLM.call, Crew.kickoff")
