"""From the text of an answer to what it says: content, reasoning, tool calls. Pure; text comes in pieces, cut anywhere.

    events.py     what comes out
    reader.py     text that arrives in pieces, read by generators that wait where it ends
    items.py      how a call is written: five kinds, each a declaration with one generator that reads it
    formats.py    the table of tool-call formats: markers and kinds, data only
    reasoning.py  the table of reasoning formats
    answer.py     the parser of one answer, made from two rows of these tables
    channels.py   the same for gpt-oss, whose answers are messages in channels
    detect.py     which rows a chat template speaks
    tags.py       the same declarations turned round: what a grammar needs to force a call

The result is a function of the whole text, however it was cut: what could be the beginning of a marker waits, and nothing else. What is no
call after all comes out as content, markers included. What leaves: markers, and white space beside calls and reasoning.
"""
