"""What several commands share: groups of options, the user's files, child processes, signals, summaries.

Nothing here is a command; the files beside this folder are the commands.
"""
