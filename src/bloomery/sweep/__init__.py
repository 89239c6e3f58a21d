"""Sweeps: runs of one recipe with different settings, and their ranking: `bloomery sweep`.

points.py          the settings of each run: a grid, or drawn from it
ranges.py          ranges of a setting, from which a search draws
store.py           the folder of a sweep: its runs, and the scores of each
scores.py          a run judged on held-out items, in a child process (scoring_worker.py)
ranking.py         who is best, and which runs the noise does not separate from it
table.py           the ranked runs, of a sweep that has ended and of a folder; what others read
page.py            report.html of a sweep
drive.py           trains and judges what is missing, one run after another
"""
