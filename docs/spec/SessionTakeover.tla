---------------------------- MODULE SessionTakeover ----------------------------
(* One kept MQTT session, gateways that share one Kafka, and QoS 2 messages      *)
(* that must be in the log exactly once, wherever the client connects and        *)
(* whichever gateway dies (ADR 0016, 0018, 0043, 0074).                          *)
(*                                                                               *)
(* Gateways write records into one partition of the table of sessions, and read  *)
(* it in order, each at its own pace. A CONNECT at a gateway that does not have  *)
(* the session claims it with a higher epoch. The claim names every gateway that *)
(* may still have a message of the session on its way to Kafka: each answers     *)
(* when it has none, or is dead. Then the session is the claimer's, which says   *)
(* so, and nobody need be asked again.                                           *)
(*                                                                               *)
(* Two assumptions, which Kafka does not give and the gateway must be built for: *)
(* what a gateway had handed to Kafka is appended or lost before anybody looks   *)
(* into the log because that gateway is dead; and a gateway that was frozen      *)
(* serves nobody before it has read the table to its end.                        *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS
    Gateways,    \* a set
    Nobody,      \* none of them
    Messages,    \* the client publishes 1..Messages at QoS 2, one after the other, all under one packet identifier
    Faults       \* how many of these happen, in any order: the client leaves its connection, or a CONNECT without an
                 \* answer (or with 0x88); PUBCOMP is lost; a gateway is killed and started again; a gateway is frozen; a
                 \* gateway stops in order

VARIABLES
    \* Kafka.
    table,       \* the records of __trivium_sessions that not everybody has read
    stored,      \* [Messages -> Nat]: how often each message is in the log
    \* The gateways.
    state,       \* [Gateways -> "up", "frozen" or "catching up"]
    life,        \* [Gateways -> Nat]: the incarnation of each
    read,        \* [Gateways -> Nat]: how much of `table` each has read
    knows,       \* [Gateways -> what all that each has read says]
    pending,     \* [Gateways -> Seq]: a session record on its way into the table
    mine,        \* [Gateways -> the session as this gateway has it]
    handing,     \* [Gateways -> what is left of a session that another gateway has claimed]
    \* The client.
    client,      \* [at: its connection, wants: its CONNECT that is not answered, message, phase]
    acknowledged,  \* messages whose PUBREC the client has
    faults       \* how many may still happen

kafka    == <<table, stored>>
gateways == <<state, life, read, pending, mine, handing, knows>>
vars     == <<kafka, gateways, client, acknowledged, faults>>

Numbers == 1..Messages
Fault == faults > 0 /\ faults' = faults - 1
Unfinished == client.message <= Messages

\* The name of a gateway process; one that is started again has another.
Name(g) == <<g, life[g]>>

(* ------------------------------------------------------------------ records *)

\* `from`: who may have a message on the way, beside the owner. `dead`: of whom it was taken over.
Session(owner, epoch, from, dead) ==
    [kind |-> "session", owner |-> owner, epoch |-> epoch, from |-> from, dead |-> dead]
\* `done`: the last message that is released. `final`: an answer. `left`: its writer has let go of the session, unasked.
Flight(by, epoch, done, final, left) ==
    [kind |-> "flight", by |-> by, epoch |-> epoch, done |-> done, final |-> final, left |-> left]
\* The answer of a gateway that has nothing of the session.
Let(by) == [kind |-> "let", by |-> by, final |-> TRUE]

\* What a reader knows after one more record: the higher epoch is right, of equals the later. `busy`: the owner, and who
\* is to be asked beside it.
\* The writer of a record that names nobody was sure of that, but it had not heard of another with the same epoch.
Learn(known, record) ==
    CASE record.kind = "session" /\ record.epoch >= known.epoch ->
            LET later == record.epoch > known.epoch \/ record.owner = known.owner
                sure == record.from = {} /\ record.dead = {} /\ later IN
            [known EXCEPT
                !.owner = record.owner,
                !.epoch = record.epoch,
                !.busy = {record.owner} \union IF sure THEN {} ELSE (@ \ record.dead) \union record.from]
      [] record.kind = "flight" /\ record.epoch >= known.flight ->
            [known EXCEPT
                !.flight = record.epoch,
                !.done = record.done,
                !.busy = IF record.left /\ record.epoch = known.epoch /\ @ = {record.by} THEN {} ELSE @]
      [] OTHER -> known

RECURSIVE LearnAll(_, _)
LearnAll(known, seq) == IF seq = <<>> THEN known ELSE LearnAll(Learn(known, Head(seq)), Tail(seq))

(* ----------------------------------------------------------------- gateways *)

\* role: "none"; "waiting" for those who were asked; "opening": the CONNECT's record is on its way; "owner".
None == [role |-> "none", epoch |-> 0, unread |-> FALSE, waiting |-> {}, done |-> 0, open |-> 0, sending |-> 0,
         stored |-> FALSE]
Nothing == [asked |-> FALSE, epoch |-> 0, done |-> 0, sending |-> 0, stored |-> FALSE]

Init ==
    /\ table = <<>>
    /\ stored = [n \in Numbers |-> 0]
    /\ state = [g \in Gateways |-> "up"]
    /\ life = [g \in Gateways |-> 0]
    /\ read = [g \in Gateways |-> 0]
    /\ knows = [g \in Gateways |-> [owner |-> Nobody, epoch |-> 0, busy |-> {}, flight |-> 0, done |-> 0]]
    /\ pending = [g \in Gateways |-> <<>>]
    /\ mine = [g \in Gateways |-> None]
    /\ handing = [g \in Gateways |-> Nothing]
    /\ client = [at |-> Nobody, wants |-> Nobody, message |-> 1, phase |-> "publish"]
    /\ acknowledged = {}
    /\ faults = Faults

\* Nothing of a frozen gateway is on its way any more.
Quiet(g) == (mine[g].sending = 0 \/ mine[g].stored) /\ (handing[g].sending = 0 \/ handing[g].stored)

Dead(name) == name[2] # life[name[1]] \/ (state[name[1]] = "frozen" /\ Quiet(name[1]))

Disconnected(g) ==
    [client EXCEPT !.at = IF @ = g THEN Nobody ELSE @, !.wants = IF @ = g THEN Nobody ELSE @]

(* ------------------------------------------------------------------ CONNECT *)

\* The session is here: its record says that nobody else has anything of it. What is open is in the log.
Opened(g, its, epoch) ==
    LET done == knows[g].done
        open == {n \in Numbers : n > done /\ stored[n] > 0} IN
    /\ mine' = [mine EXCEPT ![g] = [its EXCEPT
            !.role = "opening", !.epoch = epoch, !.unread = TRUE, !.waiting = {}, !.done = done,
            !.open = IF open = {} THEN 0 ELSE CHOOSE n \in open : TRUE]]
    /\ pending' = [pending EXCEPT ![g] = <<Session(Name(g), epoch, {}, {})>>]

\* All that was in the table when the CONNECT came is read first. A session that is here, or that nobody has, is opened.
\* Any other is claimed. Either record is on its way for a while, in which others may write.
Connect(g) ==
    /\ Unfinished
    /\ client.at = Nobody /\ client.wants = Nobody
    /\ state[g] = "up"
    /\ read[g] = Len(table)
    /\ pending[g] = <<>>
    /\ LET from == knows[g].busy \ {Name(g)} IN
       \/ /\ mine[g].role = "owner"
          /\ mine' = [mine EXCEPT ![g].role = "opening", ![g].epoch = @ + 1, ![g].unread = TRUE]
          /\ pending' = [pending EXCEPT ![g] = <<Session(Name(g), mine[g].epoch + 1, {}, {})>>]
       \/ /\ mine[g].role = "none"
          /\ from = {} /\ ~handing[g].asked
          /\ Opened(g, None, knows[g].epoch + 1)
       \/ /\ mine[g].role = "none"
          /\ from # {} \/ handing[g].asked
          /\ mine' = [mine EXCEPT ![g] = [None EXCEPT
                 !.role = "waiting", !.epoch = knows[g].epoch + 1, !.unread = TRUE, !.waiting = from]]
          /\ pending' = [pending EXCEPT ![g] = <<Session(Name(g), knows[g].epoch + 1, from, {})>>]
    /\ client' = [client EXCEPT !.wants = g]
    /\ UNCHANGED <<kafka, state, life, read, knows, handing, acknowledged, faults>>

\* Everybody who was asked has answered or is dead, and nothing of our own is on the way.
Have(g) ==
    /\ state[g] = "up"
    /\ mine[g].role = "waiting"
    /\ ~mine[g].unread
    /\ pending[g] = <<>>
    /\ ~handing[g].asked
    /\ \A name \in mine[g].waiting : Dead(name)
    /\ Opened(g, mine[g], mine[g].epoch + 1)
    /\ UNCHANGED <<kafka, state, life, read, knows, handing, client, acknowledged, faults>>

\* Kafka has a session record. That of a CONNECT is answered: CONNACK.
Written(g) ==
    /\ pending[g] # <<>>
    /\ table' = table \o pending[g]
    /\ pending' = [pending EXCEPT ![g] = <<>>]
    /\ IF mine[g].role = "opening" /\ Head(pending[g]).epoch = mine[g].epoch
       THEN /\ mine' = [mine EXCEPT ![g].role = "owner"]
            /\ client' = IF client.wants = g THEN [client EXCEPT !.at = g, !.wants = Nobody] ELSE client
       ELSE UNCHANGED <<mine, client>>
    /\ UNCHANGED <<stored, state, life, read, knows, handing, acknowledged, faults>>

(* -------------------------------------------------------- the table is read *)

\* What everybody has read is forgotten.
Fold(reads) ==
    LET least == CHOOSE n \in {reads[g] : g \in Gateways} : \A g \in Gateways : n <= reads[g] IN
    /\ table' = SubSeq(table, least + 1, Len(table))
    /\ read' = [g \in Gateways |-> reads[g] - least]

\* A record of another gateway that is right ends what is here, also a CONNECT that still waits; whoever it ends, and
\* whoever it names, owes an answer. A rival wrote with our epoch, but before us: who waits asks it too; who has opened
\* without asking anybody begins anew, unless the client is here, and so was not there.
Read(g) ==
    /\ state[g] # "frozen"
    /\ read[g] < Len(table)
    /\ LET record == table[read[g] + 1]
           its == mine[g]
           foreign == record.kind = "session" /\ record.owner # Name(g)
           rival == foreign /\ its.role # "none" /\ its.unread /\ record.epoch = its.epoch
           lost == /\ foreign
                   /\ its.role # "none"
                   /\ \/ record.epoch > its.epoch
                      \/ record.epoch = its.epoch /\ ~its.unread
                      \/ rival /\ its.role # "waiting" /\ record.from = {} /\ client.at # g
           asked == /\ foreign /\ its.role = "none"
                    /\ \/ Name(g) \in record.from
                       \/ record.from # {} /\ knows[g].owner = Name(g) /\ record.epoch >= knows[g].epoch
           answer == record.kind # "session" /\ record.final /\ its.role = "waiting" /\ ~its.unread
           own == record.kind = "session" /\ ~foreign /\ record.epoch = its.epoch
       IN /\ handing' = [handing EXCEPT ![g] =
                  IF lost /\ ~@.asked
                  THEN [asked |-> TRUE, epoch |-> IF its.role = "waiting" THEN 0 ELSE its.epoch, done |-> its.done,
                        sending |-> its.sending, stored |-> its.stored]
                  ELSE [@ EXCEPT !.asked = @ \/ asked]]
          /\ mine' = [mine EXCEPT ![g] =
                  CASE lost -> None
                    [] rival /\ its.role = "waiting" ->
                        [@ EXCEPT !.waiting = (@ \union {record.owner} \union record.from) \ {Name(g)}]
                    [] answer -> [@ EXCEPT !.waiting = @ \ {record.by}]
                    [] own -> [@ EXCEPT !.unread = FALSE]
                    [] OTHER -> @]
          /\ client' = IF lost THEN Disconnected(g) ELSE client
          /\ knows' = [knows EXCEPT ![g] = Learn(@, record)]
    /\ Fold([read EXCEPT ![g] = @ + 1])
    /\ UNCHANGED <<stored, state, life, pending, acknowledged, faults>>

\* Nothing is on the way any more.
Answer(g) ==
    /\ state[g] # "frozen"
    /\ handing[g].asked
    /\ handing[g].sending = 0
    /\ pending[g] = <<>>
    /\ table' = Append(table, IF handing[g].epoch = 0 THEN Let(Name(g))
                              ELSE Flight(Name(g), handing[g].epoch, handing[g].done, TRUE, FALSE))
    /\ handing' = [handing EXCEPT ![g] = Nothing]
    /\ UNCHANGED <<stored, state, life, read, knows, pending, mine, client, acknowledged, faults>>

\* This gateway stops: the client is sent away when nothing of it is on the way, and its session is anybody's.
LetGo(g) ==
    /\ Unfinished
    /\ Fault
    /\ state[g] = "up"
    /\ mine[g].role = "owner"
    /\ mine[g].sending = 0
    /\ pending[g] = <<>>
    /\ table' = Append(table, Flight(Name(g), mine[g].epoch, mine[g].done, FALSE, TRUE))
    /\ mine' = [mine EXCEPT ![g] = None]
    /\ client' = Disconnected(g)
    /\ UNCHANGED <<stored, state, life, read, knows, pending, handing, acknowledged>>

\* The owner is silent for long, or was this gateway before: its session is ours, without a connection.
TakeOver(g) ==
    /\ state[g] = "up"
    /\ mine[g].role = "none"
    /\ ~handing[g].asked
    /\ pending[g] = <<>>
    /\ LET known == knows[g]
           dead == {name \in known.busy : Dead(name)} IN
        /\ known.owner # Nobody
        /\ Dead(known.owner)
        /\ \A i \in (read[g] + 1)..Len(table) : table[i].kind = "session" => table[i].owner # Name(g)
        /\ table' = Append(table, Session(Name(g), known.epoch, known.busy \ dead, dead))
    /\ UNCHANGED <<stored, gateways, client, acknowledged, faults>>

(* -------------------------------------------------------------------- QoS 2 *)

Serves(g) == state[g] = "up" /\ client.at = g /\ mine[g].role = "owner"

\* PUBLISH: under an identifier that is not released it is the same message, and only answered.
Publish(g) ==
    /\ Serves(g)
    /\ client.phase = "publish"
    /\ Unfinished
    /\ mine[g].sending = 0
    /\ IF mine[g].open # 0
       THEN /\ client' = [client EXCEPT !.phase = "release"]
            /\ acknowledged' = acknowledged \union {client.message}
            /\ UNCHANGED mine
       ELSE /\ mine' = [mine EXCEPT ![g].sending = client.message, ![g].stored = FALSE]
            /\ UNCHANGED <<client, acknowledged>>
    /\ UNCHANGED <<kafka, state, life, read, knows, pending, handing, faults>>

\* Kafka appends what is on the way, of a session that is here or that is being handed over.
Store(g) ==
    \/ /\ mine[g].sending # 0 /\ ~mine[g].stored
       /\ stored' = [stored EXCEPT ![mine[g].sending] = @ + 1]
       /\ mine' = [mine EXCEPT ![g].stored = TRUE]
       /\ UNCHANGED <<table, state, life, read, knows, pending, handing, client, acknowledged, faults>>
    \/ /\ handing[g].sending # 0 /\ ~handing[g].stored
       /\ stored' = [stored EXCEPT ![handing[g].sending] = @ + 1]
       /\ handing' = [handing EXCEPT ![g].stored = TRUE]
       /\ UNCHANGED <<table, state, life, read, knows, pending, mine, client, acknowledged, faults>>

\* Kafka has answered: PUBREC.
Settle(g) ==
    /\ state[g] # "frozen"
    /\ \/ /\ mine[g].sending # 0 /\ mine[g].stored
          /\ mine' = [mine EXCEPT ![g] = [@ EXCEPT !.open = mine[g].sending, !.sending = 0, !.stored = FALSE]]
          /\ IF client.at = g /\ client.phase = "publish" /\ client.message = mine[g].sending
             THEN /\ client' = [client EXCEPT !.phase = "release"]
                  /\ acknowledged' = acknowledged \union {client.message}
             ELSE UNCHANGED <<client, acknowledged>>
          /\ UNCHANGED handing
       \/ /\ handing[g].sending # 0 /\ handing[g].stored
          /\ handing' = [handing EXCEPT ![g] = [@ EXCEPT !.sending = 0, !.stored = FALSE]]
          /\ UNCHANGED <<mine, client, acknowledged>>
    /\ UNCHANGED <<kafka, state, life, read, knows, pending, faults>>

\* PUBREL: the release is in the table before PUBCOMP leaves, which may be lost.
Release(g) ==
    /\ Serves(g)
    /\ client.phase = "release"
    /\ pending[g] = <<>>
    /\ IF mine[g].open = 0
       THEN UNCHANGED <<mine, table>>
       ELSE /\ mine' = [mine EXCEPT ![g].open = 0, ![g].done = client.message]
            /\ table' = Append(table, Flight(Name(g), mine[g].epoch, client.message, FALSE, FALSE))
    /\ \/ /\ client' = [client EXCEPT !.message = @ + 1, !.phase = "publish"]
          /\ UNCHANGED faults
       \/ /\ Fault
          /\ client' = [client EXCEPT !.at = Nobody]
    /\ UNCHANGED <<stored, state, life, read, knows, pending, handing, acknowledged>>

(* ------------------------------------------------------------------- faults *)

\* Who has claimed for a CONNECT that is given up has the session without a connection, as far as it is anybody's.
Gone ==
    /\ client' = [client EXCEPT !.at = Nobody, !.wants = Nobody]
    /\ mine' = [g \in Gateways |-> IF client.wants = g /\ mine[g].role = "waiting" THEN None ELSE mine[g]]
    /\ UNCHANGED <<kafka, state, life, read, knows, pending, handing, acknowledged>>

Leave ==
    /\ Unfinished
    /\ client.at # Nobody \/ client.wants # Nobody
    /\ Fault
    /\ Gone

\* A client does not wait for ever for a gateway that says nothing.
Despair ==
    /\ \E g \in {client.at, client.wants} \ {Nobody} : state[g] = "frozen"
    /\ Gone
    /\ UNCHANGED faults

\* SIGKILL, and a start that reads the table to its end. What was on the way is appended (it came first) or lost.
Crash(g) ==
    /\ Unfinished
    /\ state[g] = "up"
    /\ Fault
    /\ life' = [life EXCEPT ![g] = @ + 1]
    /\ mine' = [mine EXCEPT ![g] = None]
    /\ handing' = [handing EXCEPT ![g] = Nothing]
    /\ pending' = [pending EXCEPT ![g] = <<>>]
    /\ client' = Disconnected(g)
    /\ knows' = [knows EXCEPT ![g] = LearnAll(@, SubSeq(table, read[g] + 1, Len(table)))]
    /\ Fold([read EXCEPT ![g] = Len(table)])
    /\ UNCHANGED <<stored, state, acknowledged>>

\* One is left that is not frozen.
Freeze(g) ==
    /\ Unfinished
    /\ state[g] = "up"
    /\ \E other \in Gateways \ {g} : state[other] # "frozen"
    /\ Fault
    /\ state' = [state EXCEPT ![g] = "frozen"]
    /\ UNCHANGED <<kafka, life, read, knows, pending, mine, handing, client, acknowledged>>

Thaw(g) ==
    /\ state[g] = "frozen"
    /\ state' = [state EXCEPT ![g] = "catching up"]
    /\ UNCHANGED <<kafka, life, read, knows, pending, mine, handing, client, acknowledged, faults>>

CaughtUp(g) ==
    /\ state[g] = "catching up"
    /\ read[g] = Len(table)
    /\ state' = [state EXCEPT ![g] = "up"]
    /\ UNCHANGED <<kafka, life, read, knows, pending, mine, handing, client, acknowledged, faults>>

Next ==
    \/ \E g \in Gateways :
        \/ Connect(g) \/ Have(g) \/ Written(g) \/ Read(g) \/ Answer(g) \/ LetGo(g) \/ TakeOver(g)
        \/ Publish(g) \/ Store(g) \/ Settle(g) \/ Release(g)
        \/ Crash(g) \/ Freeze(g) \/ Thaw(g) \/ CaughtUp(g)
    \/ Leave \/ Despair

\* A gateway that is frozen may stay so.
Fairness ==
    /\ WF_vars(Despair)
    /\ \A g \in Gateways :
        /\ WF_vars(Connect(g)) /\ WF_vars(Have(g)) /\ WF_vars(Written(g)) /\ WF_vars(Read(g))
        /\ WF_vars(Answer(g)) /\ WF_vars(TakeOver(g)) /\ WF_vars(Publish(g)) /\ WF_vars(Store(g))
        /\ WF_vars(Settle(g)) /\ WF_vars(Release(g)) /\ WF_vars(CaughtUp(g))

Spec == Init /\ [][Next]_vars /\ Fairness

(* --------------------------------------------------------------- properties *)

\* No exchange is done twice.
ExactlyOnce == \A n \in Numbers : stored[n] <= 1

AcknowledgedIsStored == \A n \in acknowledged : stored[n] > 0

\* Who has the client's connection has the session.
ConnectedIsOwner == \A g \in Gateways : client.at = g => mine[g].role = "owner"

\* No two gateways have a message of the session on its way to Kafka.
OneSends ==
    Cardinality({g \in Gateways : ~Quiet(g)}) <= 1

\* Of those who have read everything one believes to have the session.
OneOwner ==
    \A g, h \in Gateways :
        (g # h /\ read[g] = Len(table) /\ read[h] = Len(table) /\ pending[g] = <<>> /\ pending[h] = <<>>)
            => ~(mine[g].role = "owner" /\ mine[h].role = "owner")

EverythingIsPublished == <>(client.message = Messages + 1)

OwnerIsDead ==
    \E g \in Gateways :
        LET known == LearnAll(knows[g], SubSeq(table, read[g] + 1, Len(table))) IN
        known.owner # Nobody /\ Dead(known.owner)
TakenOver == OwnerIsDead ~> ~OwnerIsDead

Symmetry == Permutations(Gateways)
================================================================================
