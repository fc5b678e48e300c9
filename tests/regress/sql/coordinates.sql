-- Coordinate descent: exact models and their support, what private ones declare, and what is refused.
SET extra_float_digits = 0;
\pset null '(null)'
CREATE TABLE doses AS
    SELECT i AS id, 0.5 * (i % 5) - (i % 3) AS answer,
           ARRAY[(i % 5)::float4, (i % 3)::float4, ((i * 7) % 11)::float4 / 11] AS x
    FROM generate_series(1, 1650) AS i;

SELECT algorithm, epsilon, round(w::numeric, 6) AS weight, support, passes, private
    FROM dp_train('doses', 'a', 'answer', '{x}', NULL, algorithm => 'cd', loss => 'squared',
        options => '{"feature_bound": 100, "iterations": 200, "l1": 0.1, "seed": 1}'), unnest(weights) AS w;
SELECT algorithm, round(w::numeric, 4) AS weight, support, passes
    FROM dp_train('doses', 'b', 'answer', '{x}', NULL, algorithm => 'gcd', loss => 'squared',
        options => '{"feature_bound": 100, "l1": 0.2, "rule": "gs-q"}'), unnest(weights) AS w;

SELECT algorithm, epsilon, delta, round(sensitivity::numeric, 8) AS sensitivity, round(noise_scale::numeric, 6) AS noise,
       mechanism, passes, private, event
    FROM dp_train('doses', 'c', 'answer', '{x}', 1, 1e-6, 'dpcd', 'squared', '{"iterations": 2, "inner_iterations": 9}');
SELECT algorithm, round(noise_scale::numeric, 6) AS noise, mechanism, round((plan ->> 'selection_epsilon')::numeric, 6) AS choice,
       plan ->> 'accountant' AS accountant, cardinality(support) <= 4 AS sparse
    FROM dp_train('doses', 'd', 'answer', '{x}', 1, 0, 'dpgcd', 'squared', '{"iterations": 2, "top": 2}');
SELECT algorithm, round(noise_scale::numeric, 6) AS noise, mechanism, plan ->> 'constants_epsilon' AS constants,
       plan ->> 'accountant' AS accountant, passes
    FROM dp_train('doses', 'e', 'answer', '{x}', 1, 1e-6, 'dpgcd', 'squared', '{"iterations": 2, "private_constants": 0.25}');

-- Under a seed coordinates, choices and noise are known, and so are the weights.
SET client_min_messages = error;
SELECT algorithm, round(w::numeric, 6) AS weight, support, private
    FROM dp_train('doses', 'f', 'answer', '{x}', 5, 1e-6, 'dpgcd', 'squared',
        '{"seed": 3, "iterations": 2, "private_constants": 0.1}'), unnest(weights) AS w;
RESET client_min_messages;

-- What is refused.
SELECT dp_train('doses', 'g', 'answer', '{x}', 1, algorithm => 'dpcd', loss => 'squared');
SELECT dp_train('doses', 'g', 'answer', '{x}', 1, 1e-6, 'dpcd', 'hinge');
SELECT dp_train('doses', 'g', 'answer', '{x}', 1, 1e-6, 'dpcd', 'squared', '{"constants": [1, 2]}');
SELECT dp_train('doses', 'g', 'answer', '{x}', 1, 1e-6, 'dpgcd', 'squared', '{"rule": "gs"}');
SELECT dp_train('doses', 'g', 'answer', '{x}', 1, 1e-6, 'dpgcd', 'squared', '{"top": 4}');
SELECT dp_train('doses', 'g', 'answer', '{x}', 1, 1e-6, 'dpgcd', 'squared', '{"epochs": 4}');
SELECT dp_train('doses', 'g', 'answer', '{x}', NULL, algorithm => 'gcd', loss => 'squared', options => '{"private_constants": 0.1}');
SELECT dp_forget(name) FROM bismarck_dp.models WHERE source = 'public.doses' ORDER BY id;
DROP TABLE doses;
