"""The algorithm and its files: knows torch and pyarrow; knows no prefect, ray or mlflow."""
