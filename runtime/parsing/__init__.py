"""Parsers of answers: content, reasoning and tool calls. Pure; text comes in deltas, cut anywhere.

    events.py             what a parser reports
    reader.py             text that arrives in deltas, read by generators that wait for more
    call_syntax.py        how a call is written: syntaxes in JSON, each a declaration with its reader
    xml_syntax.py         two more syntaxes, in markup
    literal_syntax.py     two more syntaxes, in other notations
    tool_call_formats.py  the table of tool-call formats: markers and syntaxes, data only
    call_frames.py        the texts around calls in each format, for grammars
    reasoning_formats.py  the table of reasoning formats
    answer_parser.py      the parser of one answer, made from a row of each table
    channel_parser.py     the same for gpt-oss and Muse, whose answers are messages with headers
    detect.py             which formats a model has, by name or by its chat template

The result is a function of the whole text, however it was cut: only text that could be the beginning of a
marker waits. Text that turns out not to be a call is reported as content, markers included. Markers, and
white space next to calls and reasoning, are dropped.
"""
