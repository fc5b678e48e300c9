\echo Use "CREATE EXTENSION bismarck_dp CASCADE" to load this file. \quit

-- What users call lies in the schema they chose and is named dp_*; everything else lies in schema bismarck_dp, and of
-- that only the views `models` and `ledger` and the door `call` are open to others than the extension's owner.

CREATE SCHEMA bismarck_dp;
GRANT USAGE ON SCHEMA bismarck_dp TO PUBLIC;

---------------------------------------------------------------------------------------------------------------------
-- Models
---------------------------------------------------------------------------------------------------------------------

CREATE TABLE bismarck_dp.model (
    id            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name          text NOT NULL UNIQUE,
    algorithm     text NOT NULL,
    loss          text NOT NULL,
    weights       float8[] NOT NULL,
    intercept     float8[] NOT NULL,      -- one, or one for each of many classes; empty without fit_intercept
    classes       float8[] NOT NULL,      -- the labels' own coding, of two the negative first; empty for regression
    n             bigint NOT NULL,
    d             int NOT NULL,
    epsilon       float8,                 -- NULL: not private
    delta         float8,
    sensitivity   float8,
    noise_scale   float8,
    mechanism     text NOT NULL,
    adjacency     text,
    support       int[],                  -- positions of weights that are not 0, for cd, gcd and their private versions
    trust         text,                   -- who adds the noise: central (this server) or local (each provider)
    gap           float8,                 -- duality gap, for scd
    passes        float8 NOT NULL,
    seconds       float8 NOT NULL,
    created       timestamptz NOT NULL DEFAULT pg_catalog.now(),
    private       boolean NOT NULL,
    note          text NOT NULL DEFAULT '',
    source        text NOT NULL,
    label         text NOT NULL,
    features      text[] NOT NULL,
    feature_bound float8 NOT NULL,
    scale         float8[],               -- features are divided by these, and cut to +-1; NULL: they are not
    normalize     boolean NOT NULL DEFAULT false,  -- rows are scaled to feature_bound, not just down to it
    multiclass    text,                   -- softmax or ovr: weights of each class, one after the other; NULL: two classes
    categories    jsonb,                  -- columns coded as zeros and ones, and the values that count
    project_dim   int,                    -- numbers that features are projected to; NULL: they are not
    project_seed  bigint,                 -- what the projection's matrix is made from; public
    tuning        jsonb,                  -- what it was chosen from, and how; NULL: it was trained alone
    options       jsonb NOT NULL,
    plan          jsonb NOT NULL,         -- everything dp_explain shows
    event         jsonb NOT NULL,         -- what an accountant needs: a DpEvent of the library dp-accounting
    owner         regrole NOT NULL,
    privacy_unit  text NOT NULL DEFAULT 'row', -- what the guarantee is for: a row, or so many rows of each unit
    ledger_id     bigint                  -- the entry of the ledger that paid for it; NULL: its source is not protected
);
REVOKE ALL ON bismarck_dp.model FROM PUBLIC;
SELECT pg_catalog.pg_extension_config_dump('bismarck_dp.model', '');
SELECT pg_catalog.pg_extension_config_dump('bismarck_dp.model_id_seq', '');

CREATE VIEW bismarck_dp.models WITH (security_barrier) AS
    SELECT * FROM bismarck_dp.model WHERE pg_catalog.pg_has_role(owner, 'MEMBER')
    -- A condition of the reader's own must not be counted (EXPLAIN ANALYZE) on rows that are hidden: OFFSET keeps it out.
    OFFSET 0;
GRANT SELECT ON bismarck_dp.models TO PUBLIC;

-- Numbers the packed copies; each lives and dies within one transaction.
CREATE SEQUENCE bismarck_dp.run;

---------------------------------------------------------------------------------------------------------------------
-- Protected tables and what was spent on them
---------------------------------------------------------------------------------------------------------------------

-- Roles are the cluster's: another database may have made them. PL/Python is here anyway, PL/pgSQL may not be.
DO LANGUAGE plpython3u $$
    for role in ("dp_owner", "dp_analyst"):
        if not plpy.execute(f"SELECT FROM pg_catalog.pg_roles WHERE rolname OPERATOR(pg_catalog.=) '{role}'").nrows():
            plpy.execute(f"CREATE ROLE {role} NOLOGIN")
$$;

-- A table, by its number; in a dump, by its name. Reading a name of nothing gives 0, so that one table that was left out
-- of a dump takes no ledger with it; a number is no name, because another database gives it to another table.
CREATE TYPE bismarck_dp.source;
CREATE FUNCTION bismarck_dp.source_in(cstring) RETURNS bismarck_dp.source
    LANGUAGE c STABLE STRICT AS 'MODULE_PATHNAME', 'dp_source_in';
CREATE FUNCTION bismarck_dp.source_out(bismarck_dp.source) RETURNS cstring
    LANGUAGE c STABLE STRICT AS 'MODULE_PATHNAME', 'dp_source_out';
CREATE TYPE bismarck_dp.source (INPUT = bismarck_dp.source_in, OUTPUT = bismarck_dp.source_out, LIKE = pg_catalog.oid);
CREATE CAST (bismarck_dp.source AS pg_catalog.oid) WITHOUT FUNCTION AS IMPLICIT;
CREATE CAST (pg_catalog.oid AS bismarck_dp.source) WITHOUT FUNCTION AS ASSIGNMENT;

-- Amounts are decimal numbers, whose sums are exact. The bounds that follow from epsilon and delta are made, and
-- proven, in bismarck_dp/budget.py.
CREATE TABLE bismarck_dp.protected (
    id           int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source       bismarck_dp.source,      -- NULL: it was dropped; 0: it was not there when a dump was read
    name         text NOT NULL,           -- when it was protected
    owner        text NOT NULL,           -- who owned it then: under another owner nothing is released
    active       boolean NOT NULL,        -- false: what was spent is remembered, and nothing is enforced
    epsilon      numeric NOT NULL,
    delta        numeric NOT NULL,
    composition  text NOT NULL,
    adjacency    text NOT NULL,
    privacy_unit text,                    -- the column that says whose a row is; NULL: a row is a unit
    unit_rows    int NOT NULL,
    renyi_order  float8,                  -- at which divergences add up; it never changes once something was spent
    rho          numeric,
    slack        numeric,
    summed_delta numeric NOT NULL,
    analysts     text[] NOT NULL,         -- roles whose members may train
    columns      text[],                  -- that others than the owner may name; NULL: all
    lengths      jsonb NOT NULL,          -- numbers in each array column: public
    classes      jsonb NOT NULL,          -- labels' coding by column: public
    created      timestamptz NOT NULL DEFAULT pg_catalog.now()
);
REVOKE ALL ON bismarck_dp.protected FROM PUBLIC;
CREATE UNIQUE INDEX protected_source ON bismarck_dp.protected (source)
    WHERE source::pg_catalog.oid OPERATOR(pg_catalog.<>) 0::pg_catalog.oid;
SELECT pg_catalog.pg_extension_config_dump('bismarck_dp.protected', '');
SELECT pg_catalog.pg_extension_config_dump('bismarck_dp.protected_id_seq', '');

-- Operators are named with their schema, and have exactly the types of their arguments: constraints are checked by the
-- worker, as superuser, and somebody may have operators of their own where the script looks for names.
CREATE TABLE bismarck_dp.entry (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    protected   int NOT NULL,             -- the table's; a foreign key would fail where pg_restore -j loads this first
    source      text NOT NULL,            -- its name then
    who         text NOT NULL,            -- the role that asked
    login       text NOT NULL,            -- and the one that was logged in
    made        timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    verb        text NOT NULL,
    model       text NOT NULL,
    spec        jsonb NOT NULL,
    event       jsonb NOT NULL,
    adjacency   text NOT NULL,
    privacy_unit text,                    -- and so many rows of each unit: whom the promise is for
    unit_rows   int NOT NULL,
    renyi_order float8,
    rho         numeric CHECK (rho OPERATOR(pg_catalog.>=) 0::pg_catalog.numeric), -- NULL: its divergence is not known
    slack       numeric NOT NULL CHECK (slack OPERATOR(pg_catalog.>=) 0::pg_catalog.numeric),
    epsilon     numeric NOT NULL CHECK (epsilon OPERATOR(pg_catalog.>) 0::pg_catalog.numeric),
    delta       numeric NOT NULL CHECK (delta OPERATOR(pg_catalog.>=) 0::pg_catalog.numeric),
    total_epsilon numeric NOT NULL,       -- what the table might spend then
    total_delta numeric NOT NULL,
    composition text NOT NULL,
    outcome     text NOT NULL CHECK (outcome OPERATOR(pg_catalog.=) ANY ('{paid,refused}'::pg_catalog.text[])),
    -- Sums over what was paid on this table, this entry included, so that nobody has to add up all entries.
    releases    bigint CHECK (releases OPERATOR(pg_catalog.>) 0),
    -- Those whose divergence is not known, or is one of another order.
    unpriced    bigint CHECK (unpriced OPERATOR(pg_catalog.>=) 0),
    sum_rho     numeric CHECK (sum_rho OPERATOR(pg_catalog.>=) rho),
    sum_slack   numeric CHECK (sum_slack OPERATOR(pg_catalog.>=) slack),
    sum_epsilon numeric CHECK (sum_epsilon OPERATOR(pg_catalog.>=) epsilon),
    sum_delta   numeric CHECK (sum_delta OPERATOR(pg_catalog.>=) delta),
    CHECK (pg_catalog.num_nulls(releases, unpriced, sum_rho, sum_slack, sum_epsilon, sum_delta)
        OPERATOR(pg_catalog.=) CASE WHEN outcome OPERATOR(pg_catalog.=) 'paid' THEN 0 ELSE 6 END)
);
REVOKE ALL ON bismarck_dp.entry FROM PUBLIC;
-- No two debits of a table build on the same sums.
CREATE UNIQUE INDEX entry_paid ON bismarck_dp.entry (protected, releases) WHERE outcome OPERATOR(pg_catalog.=) 'paid';
SELECT pg_catalog.pg_extension_config_dump('bismarck_dp.entry', '');
SELECT pg_catalog.pg_extension_config_dump('bismarck_dp.entry_id_seq', '');

CREATE FUNCTION bismarck_dp.append_only() RETURNS trigger
    LANGUAGE c AS 'MODULE_PATHNAME', 'dp_append_only';
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON bismarck_dp.entry
    FOR EACH STATEMENT EXECUTE FUNCTION bismarck_dp.append_only();
ALTER TABLE bismarck_dp.entry ENABLE ALWAYS TRIGGER append_only;
CREATE TRIGGER append_only BEFORE DELETE OR TRUNCATE ON bismarck_dp.protected
    FOR EACH STATEMENT EXECUTE FUNCTION bismarck_dp.append_only();
ALTER TABLE bismarck_dp.protected ENABLE ALWAYS TRIGGER append_only;
-- What was spent on a table is never handed to another.
CREATE TRIGGER same_table BEFORE UPDATE ON bismarck_dp.protected FOR EACH ROW
    WHEN (NEW.id OPERATOR(pg_catalog.<>) OLD.id OR NEW.created OPERATOR(pg_catalog.<>) OLD.created
        OR NEW.source::pg_catalog.oid OPERATOR(pg_catalog.<>) OLD.source::pg_catalog.oid
        OR (OLD.source IS NULL AND NEW.source IS NOT NULL))
    EXECUTE FUNCTION bismarck_dp.append_only();
ALTER TABLE bismarck_dp.protected ENABLE ALWAYS TRIGGER same_table;

CREATE FUNCTION bismarck_dp.forget_dropped() RETURNS event_trigger
    LANGUAGE c AS 'MODULE_PATHNAME', 'dp_forget_dropped';
CREATE EVENT TRIGGER bismarck_dp_forget_dropped ON sql_drop EXECUTE FUNCTION bismarck_dp.forget_dropped();
ALTER EVENT TRIGGER bismarck_dp_forget_dropped ENABLE ALWAYS;

-- Sums over what was paid: those that the last such entry has. Divergences of another order say nothing about this one,
-- and claims under another adjacency or for other units nothing at all.
CREATE FUNCTION bismarck_dp.spent(protected int, OUT releases bigint, OUT mixed bigint, OUT unpriced bigint,
    OUT rho numeric, OUT slack numeric, OUT epsilon numeric, OUT delta numeric)
    LANGUAGE sql STABLE AS $$
    SELECT coalesce(e.releases, 0),
        coalesce(CASE WHEN e.adjacency OPERATOR(pg_catalog.<>) p.adjacency
            OR e.privacy_unit IS DISTINCT FROM p.privacy_unit OR e.unit_rows OPERATOR(pg_catalog.<>) p.unit_rows
            THEN e.releases END, 0),
        coalesce(CASE WHEN e.renyi_order IS DISTINCT FROM p.renyi_order THEN e.releases ELSE e.unpriced END, 0),
        coalesce(e.sum_rho, 0), coalesce(e.sum_slack, 0), coalesce(e.sum_epsilon, 0), coalesce(e.sum_delta, 0)
    FROM bismarck_dp.protected AS p LEFT JOIN LATERAL (SELECT * FROM bismarck_dp.entry AS one
        WHERE one.protected OPERATOR(pg_catalog.=) p.id AND one.outcome OPERATOR(pg_catalog.=) 'paid'
        ORDER BY one.releases DESC LIMIT 1) AS e ON true
    WHERE p.id OPERATOR(pg_catalog.=) $1
$$;

-- Everyone sees the entries they made, and those of their tables.
CREATE VIEW bismarck_dp.ledger WITH (security_barrier) AS
    SELECT e.id, e.source, c.oid::pg_catalog.regclass AS "table", e.who, e.login, e.made, e.verb, e.model, e.spec,
        e.event, e.adjacency, e.privacy_unit, e.unit_rows, e.rho, e.slack, e.epsilon, e.delta,
        e.total_epsilon, e.total_delta, e.composition, e.outcome
    FROM bismarck_dp.entry AS e LEFT JOIN bismarck_dp.protected AS p ON p.id OPERATOR(pg_catalog.=) e.protected
    LEFT JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) p.source::pg_catalog.oid
    WHERE e.who OPERATOR(pg_catalog.=) CURRENT_USER::pg_catalog.text
        OR pg_catalog.pg_has_role(c.relowner, 'MEMBER')
        OR (SELECT r.rolsuper FROM pg_catalog.pg_roles AS r WHERE r.rolname OPERATOR(pg_catalog.=) CURRENT_USER)
    OFFSET 0;
GRANT SELECT ON bismarck_dp.ledger TO PUBLIC;

-- What owners have said of their tables.
CREATE VIEW bismarck_dp.protections WITH (security_barrier) AS
    SELECT c.oid::pg_catalog.regclass AS "table", p.active, p.epsilon, p.delta, p.composition, p.adjacency,
        p.privacy_unit, p.unit_rows, p.analysts, p.columns, p.lengths, p.classes, p.owner, p.created
    FROM bismarck_dp.protected AS p
    JOIN pg_catalog.pg_class AS c ON c.oid OPERATOR(pg_catalog.=) p.source::pg_catalog.oid
    WHERE pg_catalog.pg_has_role(c.relowner, 'MEMBER')
        OR (SELECT r.rolsuper FROM pg_catalog.pg_roles AS r WHERE r.rolname OPERATOR(pg_catalog.=) CURRENT_USER)
    OFFSET 0;
GRANT SELECT ON bismarck_dp.protections TO PUBLIC;

---------------------------------------------------------------------------------------------------------------------
-- Types that keep to themselves: no input, no binary output, and a summary for text
---------------------------------------------------------------------------------------------------------------------

CREATE TYPE bismarck_dp.state;
CREATE FUNCTION bismarck_dp.state_in(cstring) RETURNS bismarck_dp.state
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'dp_state_in';
CREATE FUNCTION bismarck_dp.state_out(bismarck_dp.state) RETURNS cstring
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'dp_state_out';
CREATE TYPE bismarck_dp.state (
    INPUT = bismarck_dp.state_in, OUTPUT = bismarck_dp.state_out, ALIGNMENT = double, STORAGE = external);

CREATE TYPE bismarck_dp.block;
CREATE FUNCTION bismarck_dp.block_in(cstring) RETURNS bismarck_dp.block
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'dp_block_in';
CREATE FUNCTION bismarck_dp.block_out(bismarck_dp.block) RETURNS cstring
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'dp_block_out';
CREATE TYPE bismarck_dp.block (
    INPUT = bismarck_dp.block_in, OUTPUT = bismarck_dp.block_out, ALIGNMENT = int4, STORAGE = plain);

-- The same for rows wider than a page, stored out of line.
CREATE TYPE bismarck_dp.wide_block;
CREATE FUNCTION bismarck_dp.wide_block_in(cstring) RETURNS bismarck_dp.wide_block
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'dp_block_in';
CREATE FUNCTION bismarck_dp.wide_block_out(bismarck_dp.wide_block) RETURNS cstring
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'dp_block_out';
CREATE TYPE bismarck_dp.wide_block (
    INPUT = bismarck_dp.wide_block_in, OUTPUT = bismarck_dp.wide_block_out, ALIGNMENT = int4, STORAGE = external);
CREATE CAST (bismarck_dp.wide_block AS bismarck_dp.block) WITHOUT FUNCTION AS IMPLICIT;

---------------------------------------------------------------------------------------------------------------------
-- Steps of a training, for the controller
---------------------------------------------------------------------------------------------------------------------

CREATE FUNCTION bismarck_dp.caller() RETURNS regrole
    LANGUAGE c STABLE STRICT AS 'MODULE_PATHNAME', 'dp_caller';

-- To the end of the transaction nobody drops the source or changes what it is.
CREATE FUNCTION bismarck_dp.hold_source(source regclass) RETURNS void
    LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_hold_source';

-- What training sees in a column of this type: a number, an array of numbers, or nothing.
CREATE FUNCTION bismarck_dp.number_kind(type oid) RETURNS text
    LANGUAGE c STABLE STRICT AS 'MODULE_PATHNAME', 'dp_number_kind';

-- Whether it is, whatever an old snapshot shows.
CREATE FUNCTION bismarck_dp.protected_now(source oid) RETURNS boolean
    LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_protected_now';

-- From here to the end of the call, the source is read with the extension's rights.
CREATE FUNCTION bismarck_dp.admit(source regclass) RETURNS void
    LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_admit';

-- Enters a release in the ledger, in a transaction of its own: paid, refused or unprotected.
CREATE FUNCTION bismarck_dp.debit(request jsonb, ledger oid DEFAULT 'bismarck_dp.entry'::pg_catalog.regclass,
    OUT outcome text, OUT entry bigint)
    LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_debit';

CREATE FUNCTION bismarck_dp.describe(source regclass, label text, features text[], labels boolean, params jsonb,
    OUT rows bigint, OUT shortest int, OUT longest int,
    OUT minus_one bigint, OUT zero bigint, OUT one bigint, OUT others bigint, OUT is_boolean boolean,
    OUT classes int, OUT whole bigint)
    LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_describe';

CREATE FUNCTION bismarck_dp.bounds(source regclass, label text, features text[], params jsonb)
    RETURNS float8[] LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_bounds';

CREATE FUNCTION bismarck_dp.evaluate(model text, source regclass, label text, features text[], params jsonb)
    RETURNS float8[] LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_evaluate';

CREATE FUNCTION bismarck_dp.noisy_sums(model text, source regclass, label text, features text[], params jsonb)
    RETURNS bigint[] LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_noisy_sums';

CREATE FUNCTION bismarck_dp.pack(source regclass, label text, features text[], targets regclass[], params jsonb)
    RETURNS bigint LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_pack';

CREATE FUNCTION bismarck_dp.repack(sources regclass[], targets regclass[], params jsonb)
    RETURNS bigint LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_repack';

CREATE FUNCTION bismarck_dp.pack_columns(source regclass, label text, features text[], target regclass, params jsonb)
    RETURNS bigint LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_pack_columns';

CREATE FUNCTION bismarck_dp.begin(run bigint, solver text, d int, params jsonb)
    RETURNS void LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_begin';

CREATE FUNCTION bismarck_dp.epoch_step(internal, bismarck_dp.state, int, int, bismarck_dp.block)
    RETURNS internal LANGUAGE c VOLATILE PARALLEL SAFE AS 'MODULE_PATHNAME', 'dp_epoch_step';
CREATE FUNCTION bismarck_dp.epoch_final(internal)
    RETURNS bismarck_dp.state LANGUAGE c IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'dp_epoch_final';
CREATE AGGREGATE bismarck_dp.epoch(start bismarck_dp.state, part int, block int, rows bismarck_dp.block) (
    SFUNC = bismarck_dp.epoch_step, STYPE = internal, FINALFUNC = bismarck_dp.epoch_final,
    FINALFUNC_MODIFY = READ_ONLY, PARALLEL = SAFE);

CREATE FUNCTION bismarck_dp.merge_step(bismarck_dp.state, bismarck_dp.state)
    RETURNS bismarck_dp.state LANGUAGE c IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'dp_merge_step';
CREATE FUNCTION bismarck_dp.merge_final(bismarck_dp.state)
    RETURNS bismarck_dp.state LANGUAGE c IMMUTABLE PARALLEL SAFE AS 'MODULE_PATHNAME', 'dp_merge_final';
CREATE AGGREGATE bismarck_dp.merge(part bismarck_dp.state) (
    SFUNC = bismarck_dp.merge_step, STYPE = bismarck_dp.state, FINALFUNC = bismarck_dp.merge_final,
    FINALFUNC_MODIFY = READ_WRITE, PARALLEL = SAFE);

CREATE FUNCTION bismarck_dp.fold(run bigint, query text)
    RETURNS void LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_fold';

CREATE FUNCTION bismarck_dp.sample(run bigint, tables regclass[], params jsonb)
    RETURNS void LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_sample';

CREATE FUNCTION bismarck_dp.descend(run bigint, columns regclass, params jsonb)
    RETURNS void LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_descend';

CREATE FUNCTION bismarck_dp.objective(run bigint)
    RETURNS float8 LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_objective';

CREATE FUNCTION bismarck_dp.gap(run bigint)
    RETURNS float8 LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_gap_of_run';

CREATE FUNCTION bismarck_dp.release(run bigint, noise jsonb)
    RETURNS float8[] LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_release';

-- Steps of tuning: models are held in memory, and one of them leaves.
CREATE FUNCTION bismarck_dp.split(source regclass, label text, features text[], targets regclass[], params jsonb,
    OUT rows bigint, OUT portions bigint[])
    LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_split';

CREATE FUNCTION bismarck_dp.hold(run bigint, noise jsonb)
    RETURNS void LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_hold';

CREATE FUNCTION bismarck_dp.choose(held_out regclass, runs bigint[], params jsonb,
    OUT winner int, OUT weights float8[])
    LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_choose';

CREATE FUNCTION bismarck_dp.score(held_out regclass, run bigint, best bigint, params jsonb)
    RETURNS void LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_score';

CREATE FUNCTION bismarck_dp.winner(best bigint, OUT winner int, OUT weights float8[])
    LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_winner';

CREATE FUNCTION bismarck_dp.empty(tables regclass[])
    RETURNS void LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_empty';

-- Tells the planner which casts predictions do not need.
CREATE FUNCTION bismarck_dp.predict_support(internal)
    RETURNS internal LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'dp_predict_support';

-- The controller inside the server. BLAS threads would take the backend's signals: there must be none.
CREATE FUNCTION bismarck_dp.serve(verb text, request jsonb) RETURNS jsonb LANGUAGE plpython3u AS $$
    if "serves" not in GD:
        import os, sys
        for library in ("OPENBLAS", "OMP", "MKL"):
            os.environ.setdefault(library + "_NUM_THREADS", "1")
        path = plpy.execute("SELECT pg_catalog.current_setting('bismarck_dp.python_path') AS path")[0]["path"]
        if path not in sys.path:
            sys.path.insert(0, path)
        from bismarck_dp.controller.server import serve
        from bismarck_dp.version import __version__
        # Later versions look for themselves. This one leaves its serve under another key, and enters nothing.
        if __version__ == "0.1.0":
            plpy.error("this session runs the library of version 0.1.0, which enters nothing in the ledger",
                hint="connect again", sqlstate="55000")
        GD["serves"] = serve
    return GD["serves"](plpy, verb, request)
$$;

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA bismarck_dp FROM PUBLIC;

-- The door: runs `serve` with the extension's rights, and remembers the caller, whose rights the source is read with.
CREATE FUNCTION bismarck_dp.call(verb text, request jsonb)
    RETURNS jsonb LANGUAGE c VOLATILE STRICT AS 'MODULE_PATHNAME', 'dp_call';

---------------------------------------------------------------------------------------------------------------------
-- What users call
---------------------------------------------------------------------------------------------------------------------

CREATE FUNCTION @extschema@.dp_train(
    source regclass, model text, label text, features text[], epsilon float8, delta float8 DEFAULT 0,
    algorithm text DEFAULT 'bolton', loss text DEFAULT 'logistic', options jsonb DEFAULT '{}')
    RETURNS bismarck_dp.model LANGUAGE sql VOLATILE SET extra_float_digits = 1 AS $$
    SELECT pg_catalog.jsonb_populate_record(NULL::bismarck_dp.model, bismarck_dp.call('train',
        pg_catalog.jsonb_build_object('source', source::pg_catalog.oid, 'model', model, 'label', label,
            'features', features, 'epsilon', epsilon::pg_catalog.text, 'delta', delta::pg_catalog.text,
            'algorithm', algorithm, 'loss', loss, 'options', options)))
$$;

CREATE FUNCTION @extschema@.dp_explain(
    source regclass, model text, label text, features text[], epsilon float8, delta float8 DEFAULT 0,
    algorithm text DEFAULT 'bolton', loss text DEFAULT 'logistic', options jsonb DEFAULT '{}')
    RETURNS TABLE (key text, value text) LANGUAGE sql VOLATILE SET extra_float_digits = 1 AS $$
    SELECT e.key, e.value FROM ROWS FROM (pg_catalog.jsonb_to_recordset(bismarck_dp.call('explain',
        pg_catalog.jsonb_build_object('source', source::pg_catalog.oid, 'model', model, 'label', label,
            'features', features, 'epsilon', epsilon::pg_catalog.text, 'delta', delta::pg_catalog.text,
            'algorithm', algorithm, 'loss', loss, 'options', options))
        OPERATOR(pg_catalog.->) 'explain') AS (key pg_catalog.text, value pg_catalog.text)) AS e
$$;

CREATE FUNCTION @extschema@.dp_tune(
    source regclass, model text, label text, features text[], epsilon float8, delta float8 DEFAULT 0,
    algorithm text DEFAULT 'bolton', loss text DEFAULT 'logistic', options jsonb DEFAULT '{}',
    grid jsonb DEFAULT NULL, method text DEFAULT 'portions', public_source regclass DEFAULT NULL,
    trials float8 DEFAULT 10)
    RETURNS bismarck_dp.model LANGUAGE sql VOLATILE SET extra_float_digits = 1 AS $$
    SELECT pg_catalog.jsonb_populate_record(NULL::bismarck_dp.model, bismarck_dp.call('tune',
        pg_catalog.jsonb_build_object('source', source::pg_catalog.oid, 'model', model, 'label', label,
            'features', features, 'epsilon', epsilon::pg_catalog.text, 'delta', delta::pg_catalog.text,
            'algorithm', algorithm, 'loss', loss, 'options', options, 'grid', grid, 'method', method,
            'public_source', public_source::pg_catalog.oid, 'trials', trials::pg_catalog.text)))
$$;

CREATE FUNCTION @extschema@.dp_forget(model text) RETURNS void LANGUAGE sql VOLATILE AS $$
    SELECT bismarck_dp.call('forget', pg_catalog.jsonb_build_object('model', model));
$$;

-- Exact without epsilon; with it, noisy sums and what follows from them.
CREATE FUNCTION @extschema@.dp_evaluate(
    model text, source regclass, label text DEFAULT NULL, features text[] DEFAULT NULL, epsilon float8 DEFAULT NULL,
    delta float8 DEFAULT 0, options jsonb DEFAULT '{}')
    RETURNS TABLE (metric text, value float8) LANGUAGE sql VOLATILE SET extra_float_digits = 1 AS $$
    SELECT e.metric, e.value FROM ROWS FROM (pg_catalog.jsonb_to_recordset(bismarck_dp.call('evaluate',
        pg_catalog.jsonb_build_object('source', source::pg_catalog.oid, 'model', model, 'label', label,
            'features', features, 'epsilon', epsilon::pg_catalog.text, 'delta', delta::pg_catalog.text,
            'options', options))
        OPERATOR(pg_catalog.->) 'metrics') AS (metric pg_catalog.text, value pg_catalog.float8)) AS e
$$;

CREATE FUNCTION @extschema@.dp_protect(source regclass, epsilon float8, delta float8, options jsonb DEFAULT '{}')
    RETURNS TABLE (key text, value text) LANGUAGE sql VOLATILE SET extra_float_digits = 1 AS $$
    SELECT e.key, e.value FROM ROWS FROM (pg_catalog.jsonb_to_recordset(bismarck_dp.call('protect',
        pg_catalog.jsonb_build_object('source', source::pg_catalog.oid, 'epsilon', epsilon::pg_catalog.text,
            'delta', delta::pg_catalog.text, 'options', options))
        OPERATOR(pg_catalog.->) 'protected') AS (key pg_catalog.text, value pg_catalog.text)) AS e
$$;

CREATE FUNCTION @extschema@.dp_unprotect(source regclass) RETURNS void LANGUAGE sql VOLATILE AS $$
    SELECT bismarck_dp.call('unprotect', pg_catalog.jsonb_build_object('source', source::pg_catalog.oid));
$$;

CREATE FUNCTION @extschema@.dp_budget(source regclass)
    RETURNS TABLE (epsilon_total float8, epsilon_spent float8, delta_total float8, delta_spent float8, releases bigint)
    LANGUAGE sql VOLATILE SET extra_float_digits = 1 AS $$
    SELECT b.* FROM ROWS FROM (pg_catalog.jsonb_to_record(bismarck_dp.call('budget',
        pg_catalog.jsonb_build_object('source', source::pg_catalog.oid))) AS (epsilon_total pg_catalog.float8,
            epsilon_spent pg_catalog.float8, delta_total pg_catalog.float8, delta_spent pg_catalog.float8,
            releases pg_catalog.int8)) AS b
$$;

CREATE FUNCTION @extschema@.dp_predict(model text, features float8[])
    RETURNS float8 LANGUAGE c STABLE STRICT PARALLEL SAFE SUPPORT bismarck_dp.predict_support
    AS 'MODULE_PATHNAME', 'dp_predict';

CREATE FUNCTION @extschema@.dp_predict_proba(model text, features float8[])
    RETURNS float8[] LANGUAGE c STABLE STRICT PARALLEL SAFE SUPPORT bismarck_dp.predict_support
    AS 'MODULE_PATHNAME', 'dp_predict_proba';

CREATE FUNCTION @extschema@.dp_predict_all(model text, features float8[])
    RETURNS float8[] LANGUAGE c STABLE STRICT PARALLEL SAFE SUPPORT bismarck_dp.predict_support
    AS 'MODULE_PATHNAME', 'dp_predict_all';

CREATE FUNCTION @extschema@.dp_encode(model text, "row" record)
    RETURNS float8[] LANGUAGE c STABLE STRICT PARALLEL SAFE AS 'MODULE_PATHNAME', 'dp_encode';

---------------------------------------------------------------------------------------------------------------------
-- The local protocol: providers add noise to their own gradients, the learner sees nothing else
---------------------------------------------------------------------------------------------------------------------

CREATE FUNCTION @extschema@.dp_local_start(
    d int, epsilon float8, delta float8 DEFAULT 0, loss text DEFAULT 'logistic', options jsonb DEFAULT '{}')
    RETURNS jsonb LANGUAGE sql VOLATILE SET extra_float_digits = 1 AS $$
    SELECT bismarck_dp.call('local_start', pg_catalog.jsonb_build_object('d', d, 'epsilon', epsilon::pg_catalog.text,
        'delta', delta::pg_catalog.text, 'loss', loss, 'options', options)) OPERATOR(pg_catalog.->) 'state'
$$;

CREATE FUNCTION @extschema@.dp_local_gradient(
    model_state jsonb, x float8[], y float8, epsilon float8, delta float8 DEFAULT 0)
    RETURNS float8[] LANGUAGE c VOLATILE AS 'MODULE_PATHNAME', 'dp_local_gradient';

CREATE FUNCTION bismarck_dp.local_add(internal, jsonb, float8[])
    RETURNS internal LANGUAGE c IMMUTABLE AS 'MODULE_PATHNAME', 'dp_local_add';
CREATE FUNCTION bismarck_dp.local_final(internal)
    RETURNS jsonb LANGUAGE c IMMUTABLE AS 'MODULE_PATHNAME', 'dp_local_final';
CREATE AGGREGATE @extschema@.dp_local_round(model_state jsonb, gradient float8[]) (
    SFUNC = bismarck_dp.local_add, STYPE = internal, FINALFUNC = bismarck_dp.local_final,
    FINALFUNC_MODIFY = READ_ONLY);

REVOKE EXECUTE ON FUNCTION bismarck_dp.local_add, bismarck_dp.local_final FROM PUBLIC;

CREATE FUNCTION @extschema@.dp_local_register(model_state jsonb, model text)
    RETURNS bismarck_dp.model LANGUAGE sql VOLATILE SET extra_float_digits = 1 AS $$
    SELECT pg_catalog.jsonb_populate_record(NULL::bismarck_dp.model, bismarck_dp.call('local_register',
        pg_catalog.jsonb_build_object('state', model_state, 'model', model)))
$$;

---------------------------------------------------------------------------------------------------------------------
-- Rights
---------------------------------------------------------------------------------------------------------------------

-- An administrator's ALTER DEFAULT PRIVILEGES means the tables and functions of users. What is closed here is closed to
-- everyone but the extension's owner.
DO LANGUAGE plpython3u $$
    granted = """
        SELECT 'SCHEMA' AS kind, n.nspname::pg_catalog.text AS object, a.grantee
            FROM pg_catalog.pg_namespace n, LATERAL pg_catalog.aclexplode(n.nspacl) a
            WHERE n.nspname OPERATOR(pg_catalog.=) 'bismarck_dp' AND a.grantee OPERATOR(pg_catalog.<>) n.nspowner
        UNION SELECT 'TABLE', c.oid::pg_catalog.regclass::pg_catalog.text, a.grantee
            FROM pg_catalog.pg_class c, LATERAL pg_catalog.aclexplode(c.relacl) a
            WHERE c.relnamespace OPERATOR(pg_catalog.=) 'bismarck_dp'::pg_catalog.regnamespace::pg_catalog.oid
            AND a.grantee OPERATOR(pg_catalog.<>) c.relowner
        UNION SELECT 'FUNCTION', p.oid::pg_catalog.regprocedure::pg_catalog.text, a.grantee
            FROM pg_catalog.pg_proc p, LATERAL pg_catalog.aclexplode(p.proacl) a
            WHERE p.pronamespace OPERATOR(pg_catalog.=) 'bismarck_dp'::pg_catalog.regnamespace::pg_catalog.oid
            AND p.proname OPERATOR(pg_catalog.<>) 'call' AND a.grantee OPERATOR(pg_catalog.<>) p.proowner"""
    named = f"SELECT g.*, pg_catalog.pg_get_userbyid(g.grantee) AS role FROM ({granted}) AS g"
    for row in plpy.execute(named + " WHERE g.grantee OPERATOR(pg_catalog.<>) 0::pg_catalog.oid"):
        plpy.execute(f"REVOKE ALL ON {row['kind']} {row['object']} FROM {plpy.quote_ident(row['role'])}")
$$;
REVOKE CREATE ON SCHEMA bismarck_dp FROM PUBLIC;
REVOKE INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER ON ALL TABLES IN SCHEMA bismarck_dp FROM PUBLIC;
REVOKE ALL ON ALL SEQUENCES IN SCHEMA bismarck_dp FROM PUBLIC;

-- Everyone may call them, with their own rights. An administrator who revokes that from PUBLIC leaves it to these roles.
GRANT EXECUTE ON FUNCTION @extschema@.dp_protect(regclass, float8, float8, jsonb), @extschema@.dp_unprotect(regclass)
    TO dp_owner;
GRANT EXECUTE ON FUNCTION bismarck_dp.call(text, jsonb), @extschema@.dp_budget(regclass), @extschema@.dp_forget(text),
    @extschema@.dp_train(regclass, text, text, text[], float8, float8, text, text, jsonb),
    @extschema@.dp_explain(regclass, text, text, text[], float8, float8, text, text, jsonb),
    @extschema@.dp_tune(
        regclass, text, text, text[], float8, float8, text, text, jsonb, jsonb, text, regclass, float8),
    @extschema@.dp_evaluate(text, regclass, text, text[], float8, float8, jsonb),
    @extschema@.dp_predict(text, float8[]), @extschema@.dp_predict_proba(text, float8[]),
    @extschema@.dp_predict_all(text, float8[]), @extschema@.dp_encode(text, record)
    TO dp_owner, dp_analyst;
