"""How far a search's answer is from the best that a ten times larger search finds.

The script ``search_regret.py`` runs the searches and the reference on this machine's devices.
"""
