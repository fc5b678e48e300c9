"""What the catalogs say of the extension's members, as lines that can be compared."""

from __future__ import annotations

from difflib import unified_diff

import sqlalchemy

MEMBERS = """
    WITH member AS (
        SELECT d.classid, d.objid, pg_describe_object(d.classid, d.objid, 0) AS name
        FROM pg_depend AS d JOIN pg_extension AS e ON d.refobjid = e.oid AND d.refclassid = 'pg_extension'::regclass
        WHERE e.extname = 'bismarck_dp' AND d.deptype = 'e')
"""
RIGHTS = "coalesce((SELECT string_agg(a::text, ', ' ORDER BY a::text) FROM unnest({}) AS a), 'as usual')"

FACTS = {
    "member": "SELECT name, 'here' FROM member",
    "rights, as made": f"""
        SELECT name, format('of %s: %s', p.objsubid, {RIGHTS.format("p.initprivs")})
        FROM member JOIN pg_init_privs AS p ON (p.classoid, p.objoid) = (classid, objid)""",
    "comment": """
        SELECT name, format('on %s: %s', objsubid, description)
        FROM member JOIN pg_description ON (classoid, objoid) = (classid, objid)""",
    "schema": f"""
        SELECT name, format('owner %s, rights %s', nspowner::regrole, {RIGHTS.format("nspacl")})
        FROM member JOIN pg_namespace AS n ON (tableoid, n.oid) = (classid, objid)""",
    "relation": f"""
        SELECT name, format('%s, %s, options %s, row security %s %s, identity %s, owner %s, rights %s', relkind,
            relpersistence, reloptions, relrowsecurity, relforcerowsecurity, relreplident, relowner::regrole,
            {RIGHTS.format("relacl")})
        FROM member JOIN pg_class AS c ON (tableoid, c.oid) = (classid, objid)""",
    "column": f"""
        SELECT name, format('%s: %s', row_number() OVER (PARTITION BY attrelid ORDER BY attnum), concat_ws(' ',
            attname, format_type(atttypid, atttypmod), CASE WHEN attnotnull THEN 'NOT NULL' END,
            'DEFAULT ' || pg_get_expr(adbin, adrelid), 'identity ' || nullif(attidentity::text, ''),
            'generated ' || nullif(attgenerated::text, ''), 'collation ' || nullif(attcollation, 0)::regcollation::text,
            'storage', attstorage, 'rights', {RIGHTS.format("attacl")}))
        FROM member JOIN pg_attribute ON (classid, objid) = ('pg_class'::regclass, attrelid)
        LEFT JOIN pg_attrdef ON (adrelid, adnum) = (attrelid, attnum)
        WHERE attnum > 0 AND NOT attisdropped""",
    "constraint": """
        SELECT name, concat_ws(' ', conname, pg_get_constraintdef(c.oid), 'validated', convalidated)
        FROM member JOIN pg_constraint AS c ON (classid, objid) = ('pg_class'::regclass, conrelid)""",
    "index": """
        SELECT name, pg_get_indexdef(indexrelid)
        FROM member JOIN pg_index ON (classid, objid) = ('pg_class'::regclass, indrelid)""",
    "trigger": """
        SELECT name, concat_ws(' ', pg_get_triggerdef(t.oid), 'enabled', tgenabled)
        FROM member JOIN pg_trigger AS t ON (classid, objid) = ('pg_class'::regclass, tgrelid)
        WHERE NOT tgisinternal""",
    "rule": """
        SELECT name, concat_ws(' ', pg_get_ruledef(r.oid), 'enabled', ev_enabled)
        FROM member JOIN pg_rewrite AS r ON (classid, objid) = ('pg_class'::regclass, ev_class)""",
    "policy": """
        SELECT name, (to_jsonb(p) - 'oid' - 'polrelid')::text
        FROM member JOIN pg_policy AS p ON (classid, objid) = ('pg_class'::regclass, polrelid)""",
    "sequence": """
        SELECT name, concat_ws(' ', seqtypid::regtype, (to_jsonb(s) - 'seqrelid' - 'seqtypid')::text, 'of',
            (SELECT pg_describe_object(refclassid, refobjid, refobjsubid) FROM pg_depend AS d
             WHERE (d.classid, d.objid) = (member.classid, member.objid) AND deptype IN ('a', 'i')))
        FROM member JOIN pg_sequence AS s ON (classid, objid) = ('pg_class'::regclass, seqrelid)""",
    "function": f"""
        SELECT name, format(E'%s\\nowner %s, rights %s',
            CASE WHEN prokind <> 'a' THEN pg_get_functiondef(p.oid) ELSE pg_get_function_arguments(p.oid) END,
            proowner::regrole, {RIGHTS.format("proacl")})
        FROM member JOIN pg_proc AS p ON (tableoid, p.oid) = (classid, objid)""",
    "aggregate": """
        SELECT name, concat_ws(' ', pg_get_function_result(aggfnoid), provolatile, proparallel, proisstrict,
            aggtranstype::regtype, aggmtranstype::regtype, aggsortop::regoperator,
            (to_jsonb(a) - 'aggtranstype' - 'aggmtranstype' - 'aggsortop')::text)
        FROM member JOIN pg_aggregate AS a ON (classid, objid) = ('pg_proc'::regclass, aggfnoid::oid)
        JOIN pg_proc AS p ON p.oid = objid""",
    "type": f"""
        SELECT name, concat_ws(' ', (to_jsonb(t) - 'oid' - 'typnamespace' - 'typowner' - 'typrelid' - 'typelem'
            - 'typarray' - 'typbasetype' - 'typcollation' - 'typacl')::text, typelem::regtype, typarray::regtype,
            typbasetype::regtype, typcollation::regcollation, 'owner', typowner::regrole, 'rights',
            {RIGHTS.format("typacl")})
        FROM member JOIN pg_type AS t ON (tableoid, t.oid) = (classid, objid)""",
    "cast": """
        SELECT name, concat_ws(' ', castfunc::regprocedure, castcontext, castmethod)
        FROM member JOIN pg_cast AS c ON (tableoid, c.oid) = (classid, objid)""",
    "event trigger": """
        SELECT name, concat_ws(' ', evtevent, evtfoid::regprocedure, 'enabled', evtenabled, evttags, evtowner::regrole)
        FROM member JOIN pg_event_trigger AS t ON (tableoid, t.oid) = (classid, objid)""",
    "extension": """
        SELECT extname, format('%s in %s, owner %s, relocatable %s', extversion, extnamespace::regnamespace,
            extowner::regrole, extrelocatable) FROM pg_extension WHERE extname = 'bismarck_dp'""",
    "dumped": """
        SELECT extname, format('%s %s', relation::regclass, condition)
        FROM pg_extension, unnest(extconfig, extcondition) AS c (relation, condition) WHERE extname = 'bismarck_dp'""",
}
"""By kind: the members it is about, and what is said of each."""


def catalog(connection: sqlalchemy.Connection) -> list[str]:
    """Sorted lines, each of which names its member. Names are written in full, numbers of objects not at all."""
    plain = connection.execution_options(no_parameters=True)
    plain.exec_driver_sql("SET LOCAL search_path = ''")
    lines = []
    for kind, query in FACTS.items():
        for name, fact in plain.exec_driver_sql(MEMBERS + query):
            lines += [f"{name} | {kind} | {line}" for line in fact.splitlines()]
    return sorted(lines)


def difference(wanted: list[str], got: list[str]) -> str:
    """Lines with - are missing, lines with + too many."""
    return "\n".join(line for line in unified_diff(wanted, got, n=0, lineterm="") if line[:2] not in ("--", "++", "@@"))
