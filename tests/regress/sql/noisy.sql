-- Noise inside the pass: what is declared is known, the weights are not.
SET extra_float_digits = 0;
\pset null '(null)'
CREATE TABLE visits AS
    SELECT i AS id, i % 2 = 0 AS ill, ARRAY[(i % 2)::float4, (i % 7) / 7.0, 0.5] AS x FROM generate_series(1, 700) AS i;

SELECT algorithm, loss, epsilon, delta, round(sensitivity::numeric, 4) AS sensitivity, mechanism, adjacency, trust, passes,
       private, note, array_length(weights, 1) AS weights
    FROM dp_train('visits', 'a', 'ill', '{x}', 1, algorithm => 'scs13', options => '{"epochs": 4, "workers": 2}');
SELECT algorithm, round(noise_scale::numeric, 3) AS noise_scale, mechanism, event
    FROM dp_train('visits', 'b', 'ill', '{x}', 1, 1e-6, 'scs13', 'hinge', '{"epochs": 4}');
SELECT algorithm, round(noise_scale::numeric, 2) AS noise_scale, mechanism, plan -> 'step' AS step, options
    FROM dp_train('visits', 'c', 'ill', '{x}', 1, 1e-6, 'bst14', options => '{"lambda": 0.1}');
SELECT algorithm, round(noise_scale::numeric, 2) AS noise_scale, mechanism, plan -> 'shuffle' AS shuffle,
       plan -> 'clip' AS clip
    FROM dp_train('visits', 'd', 'ill', '{x}', 1, 1e-6, 'dpsgd', 'squared', '{"clip": 0.3, "batch_size": 70}');
SELECT algorithm, round(noise_scale::numeric, 4) AS noise_scale, mechanism, trust, passes, event
    FROM dp_train('visits', 'e', 'ill', '{x}', 1, algorithm => 'banco');

-- Under a seed order, samples and noise are known, and so are the weights.
SET client_min_messages = error;
SELECT algorithm, round(w::numeric, 6) AS weight, private, note
    FROM dp_train('visits', 'f', 'ill', '{x}', 1, 1e-6, 'dpsgd', options => '{"seed": 3, "epochs": 2}'), unnest(weights) AS w;
RESET client_min_messages;

-- What is refused.
SELECT dp_train('visits', 'g', 'ill', '{x}', 1, algorithm => 'dpsgd');
SELECT dp_train('visits', 'g', 'ill', '{x}', 1, 1e-6, 'bst14', options => '{"step": 0.1}');
SELECT dp_train('visits', 'g', 'ill', '{x}', 1, algorithm => 'banco', options => '{"epochs": 2}');
SELECT dp_train('visits', 'g', 'ill', '{x}', NULL, algorithm => 'scs13');

-- The local protocol.
SELECT dp_local_start(2, 1);
SELECT array_length(dp_local_gradient(dp_local_start(2, 1), '{0.1, 0.2}', 1, 1), 1) AS numbers;
SELECT array_length(dp_local_gradient(dp_local_start(2, 1), NULL, NULL, 1), 1) AS numbers;
SELECT dp_local_round(dp_local_start(1, 1), g) -> 'gradients' AS gradients FROM (VALUES ('{1}'::float8[]), ('{2}')) AS r (g);
SELECT name, algorithm, trust, n, d, epsilon, mechanism, note
    FROM dp_local_register((SELECT dp_local_round(dp_local_start(1, 1), '{1}')), 'h');
SELECT dp_local_gradient(dp_local_start(2, 4), '{0.1, 0.2}', 1, 1);
SELECT dp_local_gradient('{}', '{0.1, 0.2}', 1, 1);
SELECT dp_local_register(dp_local_start(2, 4), 'i');

SELECT dp_forget(name) FROM bismarck_dp.models ORDER BY id;
DROP TABLE visits;
