\echo Use "ALTER EXTENSION bismarck_dp UPDATE TO '0.2.0'" to load this file. \quit

-- Makes of 0.1.0 what sql/bismarck_dp.sql makes of nothing: tests/test_upgrade.py compares the two, and says what
-- differs. What is new is written as it is there; what follows from the order of statements there is written out here.

---------------------------------------------------------------------------------------------------------------------
-- Models
---------------------------------------------------------------------------------------------------------------------

-- A column that comes with a default is refused where somebody keeps models in a column of their own.
ALTER TABLE bismarck_dp.model
    ADD COLUMN privacy_unit text,         -- what the guarantee is for: a row, or so many rows of each unit
    ADD COLUMN ledger_id bigint;          -- the entry of the ledger that paid for it; NULL: its source is not protected
UPDATE bismarck_dp.model SET privacy_unit = 'row';
ALTER TABLE bismarck_dp.model
    ALTER COLUMN privacy_unit SET DEFAULT 'row', ALTER COLUMN privacy_unit SET NOT NULL;

-- The star is of the columns there were when the view was made.
CREATE OR REPLACE VIEW bismarck_dp.models WITH (security_barrier) AS
    SELECT * FROM bismarck_dp.model WHERE pg_catalog.pg_has_role(owner, 'MEMBER')
    -- A condition of the reader's own must not be counted (EXPLAIN ANALYZE) on rows that are hidden: OFFSET keeps it out.
    OFFSET 0;

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
-- Steps of a training, for the controller
---------------------------------------------------------------------------------------------------------------------

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

CREATE OR REPLACE FUNCTION bismarck_dp.serve(verb text, request jsonb) RETURNS jsonb LANGUAGE plpython3u AS $$
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

-- By name: the door stays open to PUBLIC, or to whom an administrator left it.
REVOKE EXECUTE ON FUNCTION bismarck_dp.append_only, bismarck_dp.forget_dropped, bismarck_dp.spent,
    bismarck_dp.source_in, bismarck_dp.source_out, bismarck_dp.hold_source, bismarck_dp.protected_now,
    bismarck_dp.number_kind, bismarck_dp.admit, bismarck_dp.debit FROM PUBLIC;

---------------------------------------------------------------------------------------------------------------------
-- What users call
---------------------------------------------------------------------------------------------------------------------

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

-- GRANT and REVOKE took the rights of now for those that things are made with, and pg_dump leaves those out: what an
-- administrator revoked would be open again in a copy.
UPDATE pg_catalog.pg_init_privs
    SET initprivs = pg_catalog.acldefault('r', v.relowner) OPERATOR(pg_catalog.||)
        pg_catalog.makeaclitem(0::pg_catalog.oid, v.relowner, 'SELECT', false)
    FROM pg_catalog.pg_class AS v
    WHERE objoid OPERATOR(pg_catalog.=) v.oid AND v.oid OPERATOR(pg_catalog.=) 'bismarck_dp.models'::pg_catalog.regclass
        AND classoid OPERATOR(pg_catalog.=) 'pg_catalog.pg_class'::pg_catalog.regclass;
UPDATE pg_catalog.pg_init_privs AS made
    SET initprivs = pg_catalog.acldefault('f', f.proowner) OPERATOR(pg_catalog.||) ARRAY[
        pg_catalog.makeaclitem('dp_owner'::pg_catalog.regrole, f.proowner, 'EXECUTE', false),
        pg_catalog.makeaclitem('dp_analyst'::pg_catalog.regrole, f.proowner, 'EXECUTE', false)]
    FROM pg_catalog.pg_proc AS f
    WHERE made.objoid OPERATOR(pg_catalog.=) f.oid
        AND made.classoid OPERATOR(pg_catalog.=) 'pg_catalog.pg_proc'::pg_catalog.regclass
        AND f.oid::pg_catalog.regprocedure OPERATOR(pg_catalog.=) ANY (ARRAY[
            'bismarck_dp.call(text, jsonb)', '@extschema@.dp_forget(text)',
            '@extschema@.dp_train(regclass, text, text, text[], float8, float8, text, text, jsonb)',
            '@extschema@.dp_explain(regclass, text, text, text[], float8, float8, text, text, jsonb)',
            '@extschema@.dp_tune(regclass, text, text, text[], float8, float8, text, text, jsonb, jsonb, text, regclass, float8)',
            '@extschema@.dp_evaluate(text, regclass, text, text[], float8, float8, jsonb)',
            '@extschema@.dp_predict(text, float8[])', '@extschema@.dp_predict_proba(text, float8[])',
            '@extschema@.dp_predict_all(text, float8[])', '@extschema@.dp_encode(text, record)'
            ]::pg_catalog.regprocedure[]);
