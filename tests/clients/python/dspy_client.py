"""DSPy: predictions and a chain of thought with typed fields, through its adapters."""

# /// script
# dependencies = ["dspy==3.4.1"]
# ///

import os
from typing import Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for one on the net

import dspy
import litellm
from pydantic import BaseModel

# else DSPy does not send a schema to a model that litellm does not know
litellm.register_model(
    {
        "hosted_vllm/pocket": {
            "litellm_provider": "hosted_vllm",
            "mode": "chat",
            "supports_response_schema": True,
            "supported_openai_params": ["response_format"],
        }
    }
)
model = dspy.LM(
    "hosted_vllm/pocket",
    api_base=os.environ["RUNTIME_URL"] + "/v1",
    api_key="none",
    temperature=0,
    max_tokens=400,
    cache=False,
    engine="litellm",  # its own engine knows no schemas of models that are not in its list
    num_retries=0,
)
assert model("Count from 1 to 5.") == ["1, 2, 3, 4, 5"]
print("ok: LM")


class Review(BaseModel):
    verdict: Literal["good", "bad"]
    stars: int


class Judge(dspy.Signature):
    """Judge a product."""

    product: str = dspy.InputField()
    review: Review = dspy.OutputField()


# the schema of the fields is sent as response_format, which small models need
dspy.configure(lm=model, adapter=dspy.JSONAdapter())
assert isinstance(dspy.Predict(Judge)(product="phone").review, Review)
print("ok: Predict with JSONAdapter")
