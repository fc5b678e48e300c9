-- A protected table, as its owner, an analyst and a stranger see it.
CREATE ROLE regress_owner;
CREATE ROLE regress_analyst IN ROLE dp_analyst;
CREATE ROLE regress_stranger;
GRANT CREATE ON SCHEMA public TO regress_owner;

SET ROLE regress_owner;
CREATE TABLE regress_visits AS
    SELECT i % 2 AS y, ARRAY[(i % 2) - 0.5, (i % 7) / 10.0]::float8[] AS x, 'a' AS note FROM generate_series(1, 200) AS i;
SELECT dp_protect('regress_visits', 0, 0);
SELECT dp_protect('regress_visits', 1, 1);
SELECT dp_protect('regress_visits', 1, NULL);
SELECT dp_protect('regress_visits', 1, 0, '{"compositon": "pure"}');
SELECT dp_protect('regress_visits', 1, 0, '{"composition": "simple"}');
SELECT dp_protect('regress_visits', 1, 0, '{"analysts": "dp_analyst"}');
SELECT dp_protect('regress_visits', 1, 0, '{"analysts": ["nobody_of_that_name"]}');
SELECT dp_protect('regress_visits', 1, 0, '{"columns": ["z"]}');
SELECT dp_protect('regress_visits', 1, 0, '{"lengths": {"x": 0}}');
SELECT dp_protect('regress_visits', 1, 0, '{"classes": {"y": [1]}}');
SELECT dp_protect('pg_class', 1, 0);
SELECT dp_budget('regress_visits');
SELECT dp_unprotect('regress_visits');
SELECT key, value FROM dp_protect('regress_visits', 1, 0, '{"columns": ["y", "x"], "classes": {"y": [0, 1]}}');

SET ROLE regress_stranger;
SELECT dp_protect('regress_visits', 9, 0);
SELECT dp_unprotect('regress_visits');
SELECT dp_train('regress_visits', 'm', 'y', '{x}', 0.5);
SELECT dp_budget('regress_visits');
SELECT * FROM bismarck_dp.ledger;
SELECT * FROM bismarck_dp.entry;

SET ROLE regress_analyst;
SELECT count(*) FROM regress_visits;
SELECT name, n, d, classes, private, epsilon, ledger_id > 0 AS paid
  FROM dp_train('regress_visits', 'm', 'y', '{x}', 0.5);
SELECT * FROM dp_budget('regress_visits');
SELECT dp_train('regress_visits', 'm', 'y', '{x}', 0.1);
SELECT dp_train('regress_visits', 'o', 'y', '{x}', NULL, algorithm => 'sgd');
SELECT dp_train('regress_visits', 'o', 'y', '{x}', 0.1, options => '{"seed": 1}');
SELECT dp_train('regress_visits', 'o', 'y', '{x}', 0.1, options => '{"adjacency": "zero-out"}');
SELECT dp_train('regress_visits', 'o', 'y', '{note}', 0.1);
SELECT dp_train('regress_visits', 'o', 'y', '{x}', 0.6);
SELECT dp_evaluate('m', 'regress_visits');
SELECT metric FROM dp_evaluate('m', 'regress_visits', epsilon => 0.5, options => '{"metrics": ["accuracy"]}');
SELECT dp_train('regress_visits', 'o', 'y', '{x}', 0.000001);
SELECT who, verb, model, epsilon, delta, outcome FROM bismarck_dp.ledger ORDER BY id;

SET ROLE regress_owner;
SELECT name, private FROM dp_train('regress_visits', 'exact', 'y', '{x}', NULL, algorithm => 'sgd');
SELECT dp_train('regress_visits', 'o', 'y', '{x}', 0.1);
SELECT who, verb, model, epsilon, delta, outcome FROM bismarck_dp.ledger ORDER BY id;
SELECT dp_forget('exact');
SELECT dp_unprotect('regress_visits');
SELECT epsilon_spent, releases FROM dp_budget('regress_visits');

RESET ROLE;
UPDATE bismarck_dp.entry SET epsilon = 0.1;
DELETE FROM bismarck_dp.entry;
TRUNCATE bismarck_dp.entry;
DELETE FROM bismarck_dp.protected;
SELECT dp_forget('m');
DROP TABLE regress_visits;
SELECT name, source, active FROM bismarck_dp.protected WHERE name LIKE '%regress_visits';
REVOKE CREATE ON SCHEMA public FROM regress_owner;
DROP ROLE regress_owner, regress_analyst, regress_stranger;
