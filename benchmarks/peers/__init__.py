"""The peers, behind one small adapter each, written as a competent user of each would."""
