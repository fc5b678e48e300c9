-- Dual coordinate descent: exact models and their gap, what private ones declare, scaled rows, and what is refused.
SET extra_float_digits = 0;
\pset null '(null)'
CREATE TABLE visits AS
    SELECT i AS id, (i % 3 = 2) AS back, 0.01 * (i % 50) - 0.2 AS cost,
           ARRAY[(i % 3)::float4, ((i * 7) % 11)::float4 / 11, 100] AS x
    FROM generate_series(1, 1650) AS i;

SELECT algorithm, epsilon, round(w::numeric, 5) AS weight, round(gap::numeric, 9) AS gap, passes, private
    FROM dp_train('visits', 'a', 'back', '{x}', NULL, algorithm => 'scd',
        options => '{"lambda": 0.1, "scale": [2, 1, 200], "epochs": 200, "seed": 1}'), unnest(weights) AS w;
SELECT algorithm, loss, gap < 1e-3 AS near, passes < 50 AS early
    FROM dp_train('visits', 'b', 'cost', '{x}', NULL, algorithm => 'scd', loss => 'squared',
        options => '{"lambda": 0.1, "normalize": true, "epochs": 50, "tolerance": 1e-3}');

SELECT algorithm, epsilon, delta, round(sensitivity::numeric, 6) AS sensitivity, round(noise_scale::numeric, 4) AS noise,
       mechanism, gap, passes, private, scale, normalize
    FROM dp_train('visits', 'c', 'back', '{x}', 1, 1e-6, 'dpscd', 'hinge',
        '{"lambda": 0.01, "batch_size": 165, "clip": 0.01, "scale": 2, "normalize": true}');
SELECT key, value FROM dp_explain('visits', 'c', 'back', '{x}', 1, 1e-6, 'dpscd', 'hinge',
        '{"lambda": 0.01, "batch_size": 165, "clip": 0.01}')
    WHERE key IN ('perturbs', 'sampling_probability', 'memory', 'clip', 'step', 'accountant', 'shuffle');
SELECT algorithm, round(sensitivity::numeric, 4) AS sensitivity, noise_scale > 1 AS loud, plan ->> 'accountant' AS accountant
    FROM dp_train('visits', 'd', 'back', '{x}', 1, 1e-6, 'dpscd_seq', 'hinge',
        '{"lambda": 0.01, "batch_size": 5, "clip": 0.01, "adjacency": "zero-out"}');
SELECT algorithm, round(sensitivity::numeric, 4) AS sensitivity, round(noise_scale::numeric, 4) AS noise, note,
       plan ->> 'perturbs' AS perturbs, round(passes::numeric, 2) AS passes
    FROM dp_train('visits', 'e', 'back', '{x}', 1, 1e-6, 'dpscd_primal', 'huber', '{"inner_iterations": 2, "iterations": 9}');

-- Under a seed samples and noise are known, and so are the weights; a prediction scales its row.
SET client_min_messages = error;
SELECT algorithm, round(w::numeric, 6) AS weight, private
    FROM dp_train('visits', 'f', 'back', '{x}', 5, 1e-6, 'dpscd', 'logistic',
        '{"seed": 3, "lambda": 0.1, "batch_size": 100, "scale": [2, 1, 200]}'), unnest(weights) AS w;
RESET client_min_messages;
SELECT dp_predict('a', '{0, 0.5, 100}') AS zero, dp_predict('a', '{2, 0.5, 100}') AS two, dp_predict('a', '{9e99, 0.5, 100}') AS cut,
       dp_predict('a', '{Infinity, 0.5, 100}') AS infinite;

-- What is refused.
SELECT dp_train('visits', 'g', 'back', '{x}', 1, 1e-6, 'dpscd');
SELECT dp_train('visits', 'g', 'back', '{x}', 1, algorithm => 'dpscd', options => '{"lambda": 0.1}');
SELECT dp_train('visits', 'g', 'back', '{x}', 1, 1e-6, 'dpscd', options => '{"lambda": 0.1, "step": 1}');
SELECT dp_train('visits', 'g', 'back', '{x}', 1, 1e-6, 'dpscd', options => '{"lambda": 0.1, "scale": [1, 2]}');
SELECT dp_train('visits', 'g', 'back', '{x}', 1, 1e-6, 'dpscd_primal', 'hinge');
SELECT dp_forget(name) FROM bismarck_dp.models WHERE source = 'public.visits' ORDER BY id;
DROP TABLE visits;
