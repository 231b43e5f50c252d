"""Images, videos and sounds of requests: fetched without reaching what is not public, and decoded in
processes of their own.

    loader.py          MediaLoader: from what a client named to decoded arrays
    fetch.py           http and https, to addresses that were checked; addresses.py, url.py
    local_file.py      file: URLs, within the operator's folder
    spool.py           a client's bytes, in memory without a name
    decoders.py        starts the decode process, and reads what it decoded
    decode_process.py  forks a child for each file; decode.py, images.py, videos.py, sounds.py
"""
