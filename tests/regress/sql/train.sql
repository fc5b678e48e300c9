-- What SQL sees when all goes well.
SET extra_float_digits = 0;
\pset null '(null)'
CREATE TABLE visits AS
    SELECT i AS id, i % 2 = 0 AS ill, ARRAY[(i % 2)::float4, (i % 7) / 7.0, 0.5] AS x, (i % 2)::int2 AS a, i % 7 AS b
    FROM generate_series(1, 700) AS i;

-- Without noise and with a seed the weights are known.
SELECT name, algorithm, loss, array_length(weights, 1) AS weights, intercept, classes, n, d, epsilon, delta, sensitivity,
       noise_scale, mechanism, adjacency, passes, private, note, source, label, features, options
    FROM dp_train('visits', 'plain', 'ill', '{x}', NULL, algorithm => 'sgd', options => '{"seed": 7, "lambda": 0.01}');
SELECT round(w::numeric, 6) AS weight FROM bismarck_dp.models, unnest(weights) AS w WHERE name = 'plain';

-- Private: the sensitivity and the noise are known, the weights are not.
SELECT name, n, d, epsilon, delta, round(sensitivity::numeric, 6) AS sensitivity, round(noise_scale::numeric, 4) AS noise_scale,
       mechanism, adjacency, private, note
    FROM dp_train('visits', 'pure', 'ill', ARRAY['a', 'b'], 1.0, options => '{"lambda": 0.01, "fit_intercept": true}');
SELECT name, mechanism, round(sensitivity::numeric, 6) AS sensitivity, round(noise_scale::numeric, 4) AS noise_scale
    FROM dp_train('visits', 'approximate', 'ill', '{x}', 1.0, 1e-6, 'bolton', 'huber', '{"lambda": 0.01, "workers": 2}');

SELECT * FROM dp_explain('visits', 'pure', 'ill', '{x}', 1.0, options => '{"epochs": 2, "batch_size": 100, "step": 0.5}');

-- Prediction, in the labels' own coding.
SELECT dp_predict('plain', x) = ill::int AS right_class, count(*) FROM visits GROUP BY 1;
SELECT round((dp_predict_proba('plain', '{1, 0.5, 0.5}'))[1]::numeric, 4) AS healthy;
SELECT dp_predict('plain', NULL), dp_predict('plain', '{1, NULL, 1}'), dp_predict('plain', '{1, Infinity, 1}');

SELECT name, owner FROM bismarck_dp.models ORDER BY id;
SELECT dp_forget(name) FROM bismarck_dp.models ORDER BY id;
SELECT count(*) FROM bismarck_dp.models;
DROP TABLE visits;
