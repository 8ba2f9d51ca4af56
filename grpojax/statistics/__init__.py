"""The paper: U-statistics, exact errors, group sizes, diagnoses, intervals."""
