"""Options: one declarative table, three pure stages.

declare   declare.py, and a file a group         what there is
derive    derive.py, facts.py, resolve.py        what "auto" means here
check     rules.py                               what cannot work together

given = from_argv(argv)      what the user said
plan = plan_for(given)       the values in force (plan.py), with sources and reasons
"""
