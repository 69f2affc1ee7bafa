"""The main job: four small experiments on this machine's CPU and one page that shows them.

    python -m tilewise demo          writes tilewise-demo/index.html

Every measurement runs in a fresh process of its own (``worker``), so that memory and time are those of one thing only.
"""
