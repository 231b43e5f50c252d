"""From the text of an answer to what it says: content, reasoning, tool calls. Pure; text comes in pieces, cut
anywhere.

    events.py     what comes out
    reader.py     text that arrives in pieces, read by generators that wait where it ends
    items.py      how a call is written: kinds in JSON, each a declaration with one generator that reads it
    tags.py       two more kinds, in markup
    literals.py   two more kinds, in other notations
    formats.py    the tables of tool-call and reasoning formats: markers and kinds, data only
    answer.py     the parser of one answer, made from two rows of these tables
    actors/channels.py   the same for gpt-oss and Muse, whose answers are messages with headers
    choose.py     which formats a model has, by name or by its chat template, and its parser

The result is a function of the whole text, however it was cut: what could be the beginning of a marker waits,
and nothing else. What is no call after all comes out as content, markers included. What leaves: markers, and
white space beside calls and reasoning.
"""
