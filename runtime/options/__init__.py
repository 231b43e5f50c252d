"""Options: one declarative table, three pure stages.

declare   declare.py, groups/                 what there is: one file for each concern
derive    groups/, resolve.py, facts.py       what "auto" means: a function next to the option
check     rules/                              what cannot work together, or with this model and device

parsed = from_argv(argv)     the given options (parse.py), with their sources
plan = plan_for(parsed)      the values in force (plan.py), with sources and reasons
"""
