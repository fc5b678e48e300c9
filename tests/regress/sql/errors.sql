-- What SQL sees when something is wrong: a message, a hint, and nothing left.
CREATE TABLE visits AS SELECT i % 2 AS y, ARRAY[i, 1.0] AS x, 'a' AS t FROM generate_series(1, 20) AS i;

SELECT dp_train('nothing', 'm', 'y', '{x}', 1.0);
SELECT dp_train('visits', 'm', 'z', '{x}', 1.0);
SELECT dp_train('visits', 'm', 'y', '{t}', 1.0);
SELECT dp_train('visits', 'm', 'y', '{x}', 0);
SELECT dp_train('visits', 'm', 'y', '{x}', 'NaN');
SELECT dp_train('visits', 'm', 'y', '{x}', NULL);
SELECT dp_train('visits', 'm', 'y', '{x}', 1.0, 1.5);
SELECT dp_train('visits', 'm', 'y', '{x}', 1.0, algorithm => 'boltn');
SELECT dp_train('visits', 'm', 'y', '{x}', 1.0, loss => 'hinge');
SELECT dp_train('visits', 'm', 'y', '{x}', 1.0, options => '{"epocs": 3}');
SELECT dp_train('visits', 'm', 'y', '{x}', 1.0, options => '{"batch_size": 21}');
SELECT dp_train('visits', 'm', 'y', '{x}', 1.0, options => '{"step": 9}');
SELECT dp_predict('m', '{1}');
SELECT dp_forget('m');
SELECT '1'::bismarck_dp.state;
SELECT bismarck_dp.call('steal', '{}');

SELECT count(*) FROM bismarck_dp.models;
SELECT relname FROM pg_class WHERE relname LIKE 'run\_%';
DROP TABLE visits;
