"""Pages on their way between servers: one computes prompts, another one answers (docs/disaggregation.md)."""
