"""The regret of a search's answer against the best of a ten times larger search.

The script ``search_regret.py`` runs the searches and the reference on this machine's devices.
"""
