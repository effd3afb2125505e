"""Looking at runs: what a store says as plain data, the page that shows it (`esper watch`), and one file to mail.

`source.py` finds and opens what is watched, `overview.py`, `curves.py`, `episode_answers.py` and `findings.py` ask it,
`server.py` and `live.py` serve the answers, `report.py` draws them. Only the server needs the packages of `esper[web]`.
Nothing here writes into a run.
"""
