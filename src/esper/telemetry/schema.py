"""The tables and views of a run store, and how a store of an older version becomes one of this version.

`update_number` and not `update`, because the latter is a word of SQL. In `metrics` a value that is NULL was measured
and is not a number; what was not measured has no row.
"""

from __future__ import annotations

_VERSION_1 = """
CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL  -- JSON
) WITHOUT ROWID;

CREATE TABLE sessions (  -- one row for each time that a process began to write
    session INTEGER PRIMARY KEY,
    started REAL NOT NULL,  -- seconds since 1970
    from_update INTEGER NOT NULL,  -- 0, or the update that was resumed from
    process INTEGER NOT NULL,
    version TEXT NOT NULL,
    command TEXT NOT NULL
);

CREATE TABLE metrics (
    name TEXT NOT NULL,
    update_number INTEGER NOT NULL,
    value REAL,
    PRIMARY KEY (name, update_number)
) WITHOUT ROWID;

CREATE TABLE episodes (
    update_number INTEGER NOT NULL,
    arm TEXT NOT NULL,
    env INTEGER NOT NULL,
    draw INTEGER NOT NULL,
    episode_return REAL,
    score REAL,
    accuracy REAL,
    parameters INTEGER NOT NULL,
    host_parameters INTEGER NOT NULL,
    length INTEGER NOT NULL,
    governor TEXT,
    PRIMARY KEY (update_number, arm, env)
) WITHOUT ROWID;

CREATE TABLE episode_rewards (
    update_number INTEGER NOT NULL,
    arm TEXT NOT NULL,
    env INTEGER NOT NULL,
    term TEXT NOT NULL,
    value REAL,
    PRIMARY KEY (update_number, arm, env, term)
) WITHOUT ROWID;

CREATE TABLE decisions (
    update_number INTEGER NOT NULL,
    arm TEXT NOT NULL,
    env INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    op TEXT NOT NULL,
    slot TEXT,
    blueprint TEXT,
    blend TEXT,
    p_op REAL,  -- probability of what the head chose; NULL where the head was not used
    p_slot REAL,
    p_blueprint REAL,
    p_blend REAL,
    value REAL,
    reward REAL,
    changed INTEGER NOT NULL,
    message TEXT NOT NULL,
    PRIMARY KEY (update_number, arm, env, epoch)
) WITHOUT ROWID;

CREATE TABLE step_rewards (  -- at the detailed level only
    update_number INTEGER NOT NULL,
    arm TEXT NOT NULL,
    env INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    term TEXT NOT NULL,
    value REAL,
    PRIMARY KEY (update_number, arm, env, epoch, term)
) WITHOUT ROWID;

CREATE TABLE events (
    event INTEGER PRIMARY KEY,
    time REAL NOT NULL,  -- seconds since 1970
    kind TEXT NOT NULL,
    severity TEXT NOT NULL,
    update_number INTEGER NOT NULL,
    arm TEXT NOT NULL,
    env INTEGER,
    epoch INTEGER,
    slot TEXT,
    seed INTEGER,
    message TEXT NOT NULL,
    data TEXT NOT NULL  -- JSON
);
CREATE INDEX events_by_kind ON events (kind, update_number);
CREATE INDEX events_by_update ON events (update_number);
"""

_VERSION_2 = """-- views only: v_actions and v_lifecycle_counts also read the counts of runs that record a sample
"""

_VERSION_3 = """
ALTER TABLE decisions ADD COLUMN accuracy REAL;  -- of the validation set at the end of the epoch, in percent
ALTER TABLE decisions ADD COLUMN parameters INTEGER;  -- of the network as it acts then

CREATE TABLE step_details (  -- of some episodes of each rollout
    update_number INTEGER NOT NULL,
    arm TEXT NOT NULL,
    env INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    slots TEXT NOT NULL,  -- JSON: of each slot its path, stage, alpha, contribution, shadow benefit
    choices TEXT,  -- JSON: by head, the probability of every choice; null is illegal. NULL where rules decided
    PRIMARY KEY (update_number, arm, env, epoch)
) WITHOUT ROWID;
"""

MIGRATIONS: tuple[str, ...] = (_VERSION_1, _VERSION_2, _VERSION_3)
"""Script number i brings a store from version i to i + 1. A published script never changes; a new one is added."""

RUN_TABLES = ("metrics", "episodes", "episode_rewards", "decisions", "step_details", "step_rewards", "events")
"""What belongs to an update, and goes when the run is taken back before it."""

_SAMPLED = "SELECT update_number FROM metrics WHERE name = 'sampled_episodes'"
"""Updates of whose rollout only some episodes are in `decisions` and `events`: counts over all are metrics."""

VIEWS = {
    "v_progress": """
        SELECT e.*, p.entropy, p.kl, p.clip_fraction, p.explained_variance, p.gradient_norm
        FROM (
            SELECT update_number, count(*) AS episodes, avg(episode_return) AS episode_return, avg(score) AS score,
                   avg(accuracy) AS accuracy, avg(parameters) AS parameters, avg(length) AS length,
                   count(governor) AS stopped_by_governor
            FROM episodes WHERE arm = 'train' GROUP BY update_number
        ) AS e
        LEFT JOIN (
            SELECT update_number,
                   max(value) FILTER (WHERE name = 'entropy') AS entropy,
                   max(value) FILTER (WHERE name = 'kl') AS kl,
                   max(value) FILTER (WHERE name = 'clip_fraction') AS clip_fraction,
                   max(value) FILTER (WHERE name = 'explained_variance') AS explained_variance,
                   max(value) FILTER (WHERE name = 'gradient_norm') AS gradient_norm
            FROM metrics
            WHERE name IN ('entropy', 'kl', 'clip_fraction', 'explained_variance', 'gradient_norm')
            GROUP BY update_number
        ) AS p USING (update_number)""",
    "v_evaluations": """
        SELECT update_number, arm, count(*) AS episodes, avg(episode_return) AS episode_return, avg(score) AS score,
               avg(accuracy) AS accuracy, avg(parameters) AS parameters, count(governor) AS stopped_by_governor
        FROM episodes WHERE arm <> 'train' GROUP BY update_number, arm""",
    "v_lifecycle": """
        SELECT update_number, arm, env, epoch, slot, seed, json_extract(data, '$.source') AS source,
               json_extract(data, '$.target') AS target, message AS reason
        FROM events WHERE kind = 'lifecycle'""",
    "v_lifecycle_counts": f"""
        SELECT update_number, arm, json_extract(data, '$.target') AS target, count(*) AS transitions
        FROM events
        WHERE kind = 'lifecycle' AND (arm <> 'train' OR update_number NOT IN ({_SAMPLED}))
        GROUP BY update_number, arm, target
        UNION ALL
        SELECT update_number, 'train', substr(name, 13), CAST(value AS INTEGER)
        FROM metrics WHERE name GLOB 'transitions/*' AND value > 0""",
    "v_seeds": """
        SELECT l.update_number, l.arm, l.env, l.slot, l.seed, d.blueprint, d.blend,
               min(l.epoch) FILTER (WHERE l.target = 'GERMINATED') AS germinated,
               min(l.epoch) FILTER (WHERE l.target = 'BLENDING') AS blending,
               min(l.epoch) FILTER (WHERE l.target = 'FOSSILIZED') AS fossilized,
               min(l.epoch) FILTER (WHERE l.target = 'PRUNED') AS pruned,
               max(l.reason) FILTER (WHERE l.target IN ('FOSSILIZED', 'PRUNED')) AS reason
        FROM v_lifecycle AS l
        LEFT JOIN v_lifecycle AS born
               ON born.update_number = l.update_number AND born.arm = l.arm AND born.env = l.env
              AND born.slot = l.slot AND born.seed = l.seed AND born.target = 'GERMINATED'
        LEFT JOIN decisions AS d
               ON d.update_number = l.update_number AND d.arm = l.arm AND d.env = l.env AND d.epoch = born.epoch
        GROUP BY l.update_number, l.arm, l.env, l.slot, l.seed""",
    "v_episode_rewards": """
        SELECT r.update_number, r.arm, r.env, e.draw, r.term, r.value, e.episode_return, e.score
        FROM episode_rewards AS r LEFT JOIN episodes AS e USING (update_number, arm, env)""",
    "v_reward_terms": """
        SELECT update_number, arm, term, avg(value) AS mean, min(value) AS least, max(value) AS most
        FROM episode_rewards GROUP BY update_number, arm, term""",
    "v_actions": f"""
        WITH counted AS (
            SELECT update_number, arm, op, count(*) AS times, sum(changed) AS effective, avg(p_op) AS probability
            FROM decisions WHERE arm <> 'train' OR update_number NOT IN ({_SAMPLED})
            GROUP BY update_number, arm, op
            UNION ALL
            SELECT a.update_number, 'train', substr(a.name, 9), CAST(a.value AS INTEGER), CAST(e.value AS INTEGER),
                   p.value
            FROM metrics AS a
            LEFT JOIN metrics AS e
                   ON e.name = 'effective/' || substr(a.name, 9) AND e.update_number = a.update_number
            LEFT JOIN metrics AS p
                   ON p.name = 'probability/' || substr(a.name, 9) AND p.update_number = a.update_number
            WHERE a.name GLOB 'actions/*' AND a.value > 0
        )
        SELECT update_number, arm, op, times,
               times * 1.0 / sum(times) OVER (PARTITION BY update_number, arm) AS share, effective, probability
        FROM counted""",
    "v_anomalies": """
        SELECT update_number, severity, json_extract(data, '$.name') AS name, json_extract(data, '$.metric') AS metric,
               json_extract(data, '$.seen') AS seen, json_extract(data, '$.limit') AS "limit", message
        FROM events WHERE kind = 'anomaly'""",
    "v_findings": """
        SELECT update_number, arm, env, epoch, slot, seed, kind, severity, message, data
        FROM events WHERE kind IN ('reward_hacking', 'ransomware', 'governor')""",
    "v_timers": """
        SELECT update_number, substr(name, 9) AS phase, value AS seconds FROM metrics WHERE name LIKE 'seconds/%'""",
}
"""For people. What each shows is in `docs/telemetry.md`; a test holds page and views together."""


def upgrade_script(version: int, migrations: tuple[str, ...] = MIGRATIONS) -> str:
    """From `version` to the newest, in one transaction: a store is never half way."""
    views = "".join(f"DROP VIEW IF EXISTS {name};\nCREATE VIEW {name} AS {query};\n" for name, query in VIEWS.items())
    return f"BEGIN IMMEDIATE;\n{''.join(migrations[version:])}{views}PRAGMA user_version = {len(migrations)};\nCOMMIT;"
