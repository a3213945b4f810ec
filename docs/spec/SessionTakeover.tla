---------------------------- MODULE SessionTakeover ----------------------------
(* One persistent MQTT session, several gateways on one Kafka, and QoS 2         *)
(* messages that must be in the log exactly once, wherever the client connects   *)
(* and whichever gateway dies (ADR 0074, 0100).                                  *)
(*                                                                               *)
(* Gateways write records into one partition of the session table and read it    *)
(* in order, each at its own pace. A gateway that does not own the session       *)
(* claims it at a CONNECT with a higher epoch. The claim names every gateway     *)
(* that may still have a message of the session in flight to Kafka. Each of      *)
(* them answers when it has none, or is dead. Then the claimer owns the session  *)
(* and writes this, so no gateway need be asked again.                           *)
(*                                                                               *)
(* Two assumptions, which Kafka does not guarantee and the gateway must ensure:  *)
(* the last messages of a dead gateway are appended or lost before another       *)
(* gateway searches the log; and a gateway that was frozen serves no client      *)
(* before it has read the table to its end.                                      *)
EXTENDS Naturals, Sequences, FiniteSets, TLC

CONSTANTS
    Gateways,    \* a set
    NoGateway,      \* no gateway
    Messages,    \* the client publishes 1..Messages at QoS 2, one after the other, all under one packet identifier
    Faults       \* how many of these happen, in any order: the client closes its connection, or gives up a CONNECT
                 \* (no answer, or 0x88); PUBCOMP is lost; a gateway is killed and restarted; a gateway is frozen; a
                 \* gateway stops in order

VARIABLES
    \* Kafka.
    table,       \* the records of __trivium_sessions that not all gateways have read
    stored,      \* [Messages -> Nat]: how often each message is in the log
    \* The gateways.
    state,       \* [Gateways -> "up", "frozen" or "catching up"]
    life,        \* [Gateways -> Nat]: the incarnation of each
    read,        \* [Gateways -> Nat]: how much of `table` each has read
    knows,       \* [Gateways -> the state according to all records that each has read]
    pending,     \* [Gateways -> Seq]: a session record in flight to the table
    mine,        \* [Gateways -> the session in this gateway]
    handing,     \* [Gateways -> the rest of a session that another gateway has claimed]
    \* The client.
    client,      \* [at: its connection, wants: its unanswered CONNECT, message, phase]
    acknowledged,  \* messages whose PUBREC the client has received
    faults       \* remaining number of faults

kafka    == <<table, stored>>
gateways == <<state, life, read, pending, mine, handing, knows>>
vars     == <<kafka, gateways, client, acknowledged, faults>>

Numbers == 1..Messages
Fault == faults > 0 /\ faults' = faults - 1
Unfinished == client.message <= Messages

\* The name of a gateway process; a restarted one has another name.
Name(g) == <<g, life[g]>>

(* ------------------------------------------------------------------ records *)

\* `from`: gateways other than the owner that may have a message in flight. `dead`: gateways it was taken over from.
Session(owner, epoch, from, dead) ==
    [kind |-> "session", owner |-> owner, epoch |-> epoch, from |-> from, dead |-> dead]
\* `done`: the last released message. `final`: an answer. `left`: its writer has released the session without a claim.
Flight(by, epoch, done, final, left) ==
    [kind |-> "flight", by |-> by, epoch |-> epoch, done |-> done, final |-> final, left |-> left]
\* The answer of a gateway without state of the session.
NothingHeld(by) == [kind |-> "let", by |-> by, final |-> TRUE]

\* A reader's state after one more record: the record with the higher epoch is right; of equal ones, the later. `busy`:
\* the owner, and the other gateways to be asked.
\* A record with an empty `from` is reliable, except that its writer did not know another one with the same epoch.
Apply(known, record) ==
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

RECURSIVE ApplyAll(_, _)
ApplyAll(known, seq) == IF seq = <<>> THEN known ELSE ApplyAll(Apply(known, Head(seq)), Tail(seq))

(* ----------------------------------------------------------------- gateways *)

\* role: "none"; "waiting" for the asked gateways; "opening": the CONNECT's record is in flight; "owner".
None == [role |-> "none", epoch |-> 0, unread |-> FALSE, waiting |-> {}, done |-> 0, open |-> 0, sending |-> 0,
         stored |-> FALSE]
Nothing == [asked |-> FALSE, epoch |-> 0, done |-> 0, sending |-> 0, stored |-> FALSE]

Init ==
    /\ table = <<>>
    /\ stored = [n \in Numbers |-> 0]
    /\ state = [g \in Gateways |-> "up"]
    /\ life = [g \in Gateways |-> 0]
    /\ read = [g \in Gateways |-> 0]
    /\ knows = [g \in Gateways |-> [owner |-> NoGateway, epoch |-> 0, busy |-> {}, flight |-> 0, done |-> 0]]
    /\ pending = [g \in Gateways |-> <<>>]
    /\ mine = [g \in Gateways |-> None]
    /\ handing = [g \in Gateways |-> Nothing]
    /\ client = [at |-> NoGateway, wants |-> NoGateway, message |-> 1, phase |-> "publish"]
    /\ acknowledged = {}
    /\ faults = Faults

\* A frozen gateway has no message in flight any more.
Quiet(g) == (mine[g].sending = 0 \/ mine[g].stored) /\ (handing[g].sending = 0 \/ handing[g].stored)

Dead(name) == name[2] # life[name[1]] \/ (state[name[1]] = "frozen" /\ Quiet(name[1]))

Disconnected(g) ==
    [client EXCEPT !.at = IF @ = g THEN NoGateway ELSE @, !.wants = IF @ = g THEN NoGateway ELSE @]

(* ------------------------------------------------------------------ CONNECT *)

\* The session is opened here: no other gateway has state of it, according to its record. Open messages are in the log.
Opened(g, its, epoch) ==
    LET done == knows[g].done
        open == {n \in Numbers : n > done /\ stored[n] > 0} IN
    /\ mine' = [mine EXCEPT ![g] = [its EXCEPT
            !.role = "opening", !.epoch = epoch, !.unread = TRUE, !.waiting = {}, !.done = done,
            !.open = IF open = {} THEN 0 ELSE CHOOSE n \in open : TRUE]]
    /\ pending' = [pending EXCEPT ![g] = <<Session(Name(g), epoch, {}, {})>>]

\* The gateway first reads the table as of the CONNECT. It opens a session that it owns, or that has no owner, and
\* claims any other. Either record is in flight for a while, in which others may write.
Connect(g) ==
    /\ Unfinished
    /\ client.at = NoGateway /\ client.wants = NoGateway
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

\* Every asked gateway has answered or is dead, and this gateway has no message in flight.
Acquire(g) ==
    /\ state[g] = "up"
    /\ mine[g].role = "waiting"
    /\ ~mine[g].unread
    /\ pending[g] = <<>>
    /\ ~handing[g].asked
    /\ \A name \in mine[g].waiting : Dead(name)
    /\ Opened(g, mine[g], mine[g].epoch + 1)
    /\ UNCHANGED <<kafka, state, life, read, knows, handing, client, acknowledged, faults>>

\* Kafka has stored a session record. If it is that of a CONNECT, CONNACK is sent.
Written(g) ==
    /\ pending[g] # <<>>
    /\ table' = table \o pending[g]
    /\ pending' = [pending EXCEPT ![g] = <<>>]
    /\ IF mine[g].role = "opening" /\ Head(pending[g]).epoch = mine[g].epoch
       THEN /\ mine' = [mine EXCEPT ![g].role = "owner"]
            /\ client' = IF client.wants = g THEN [client EXCEPT !.at = g, !.wants = NoGateway] ELSE client
       ELSE UNCHANGED <<mine, client>>
    /\ UNCHANGED <<stored, state, life, read, knows, handing, acknowledged, faults>>

(* -------------------------------------------------------- the table is read *)

\* Records that all gateways have read are dropped from the model.
Fold(reads) ==
    LET least == CHOOSE n \in {reads[g] : g \in Gateways} : \A g \in Gateways : n <= reads[g] IN
    /\ table' = SubSeq(table, least + 1, Len(table))
    /\ read' = [g \in Gateways |-> reads[g] - least]

\* A valid record of another gateway ends the session here, also a waiting CONNECT. A gateway whose session it ends, or
\* that it names, must answer. A rival wrote with our epoch, but before us: a waiting gateway asks it too; a gateway
\* that opened without asking starts again, unless the client is connected here, and so was not connected there.
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
          /\ knows' = [knows EXCEPT ![g] = Apply(@, record)]
    /\ Fold([read EXCEPT ![g] = @ + 1])
    /\ UNCHANGED <<stored, state, life, pending, acknowledged, faults>>

\* This gateway has no message in flight any more.
Answer(g) ==
    /\ state[g] # "frozen"
    /\ handing[g].asked
    /\ handing[g].sending = 0
    /\ pending[g] = <<>>
    /\ table' = Append(table, IF handing[g].epoch = 0 THEN NothingHeld(Name(g))
                              ELSE Flight(Name(g), handing[g].epoch, handing[g].done, TRUE, FALSE))
    /\ handing' = [handing EXCEPT ![g] = Nothing]
    /\ UNCHANGED <<stored, state, life, read, knows, pending, mine, client, acknowledged, faults>>

\* This gateway stops: it disconnects the client when no message is in flight, and releases the session.
ReleaseSession(g) ==
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

\* The owner is dead, or is a former process of this gateway: this gateway takes over the session, without a connection.
TakeOver(g) ==
    /\ state[g] = "up"
    /\ mine[g].role = "none"
    /\ ~handing[g].asked
    /\ pending[g] = <<>>
    /\ LET known == knows[g]
           dead == {name \in known.busy : Dead(name)} IN
        /\ known.owner # NoGateway
        /\ Dead(known.owner)
        /\ \A i \in (read[g] + 1)..Len(table) : table[i].kind = "session" => table[i].owner # Name(g)
        /\ table' = Append(table, Session(Name(g), known.epoch, known.busy \ dead, dead))
    /\ UNCHANGED <<stored, gateways, client, acknowledged, faults>>

(* -------------------------------------------------------------------- QoS 2 *)

Serves(g) == state[g] = "up" /\ client.at = g /\ mine[g].role = "owner"

\* PUBLISH: with an unreleased identifier it is the same message, and is only answered.
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

\* Kafka appends the message in flight, of a session that is here or that is being handed over.
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

\* PUBREL: the release is in the table before PUBCOMP is sent, which may be lost.
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
          /\ client' = [client EXCEPT !.at = NoGateway]
    /\ UNCHANGED <<stored, state, life, read, knows, pending, handing, acknowledged>>

(* ------------------------------------------------------------------- faults *)

\* The client leaves. A gateway that was waiting on its behalf drops the claim; others keep the session without it.
ClientLeaves ==
    /\ client' = [client EXCEPT !.at = NoGateway, !.wants = NoGateway]
    /\ mine' = [g \in Gateways |-> IF client.wants = g /\ mine[g].role = "waiting" THEN None ELSE mine[g]]
    /\ UNCHANGED <<kafka, state, life, read, knows, pending, handing, acknowledged>>

Leave ==
    /\ Unfinished
    /\ client.at # NoGateway \/ client.wants # NoGateway
    /\ Fault
    /\ ClientLeaves

\* A client does not wait forever for a frozen gateway.
GiveUpWaiting ==
    /\ \E g \in {client.at, client.wants} \ {NoGateway} : state[g] = "frozen"
    /\ ClientLeaves
    /\ UNCHANGED faults

\* SIGKILL, and a restart that reads the table to its end. A message in flight is appended (before the crash) or lost.
Crash(g) ==
    /\ Unfinished
    /\ state[g] = "up"
    /\ Fault
    /\ life' = [life EXCEPT ![g] = @ + 1]
    /\ mine' = [mine EXCEPT ![g] = None]
    /\ handing' = [handing EXCEPT ![g] = Nothing]
    /\ pending' = [pending EXCEPT ![g] = <<>>]
    /\ client' = Disconnected(g)
    /\ knows' = [knows EXCEPT ![g] = ApplyAll(@, SubSeq(table, read[g] + 1, Len(table)))]
    /\ Fold([read EXCEPT ![g] = Len(table)])
    /\ UNCHANGED <<stored, state, acknowledged>>

\* At least one other gateway is not frozen.
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
        \/ Connect(g) \/ Acquire(g) \/ Written(g) \/ Read(g) \/ Answer(g) \/ ReleaseSession(g) \/ TakeOver(g)
        \/ Publish(g) \/ Store(g) \/ Settle(g) \/ Release(g)
        \/ Crash(g) \/ Freeze(g) \/ Thaw(g) \/ CaughtUp(g)
    \/ Leave \/ GiveUpWaiting

\* A frozen gateway may stay frozen.
Fairness ==
    /\ WF_vars(GiveUpWaiting)
    /\ \A g \in Gateways :
        /\ WF_vars(Connect(g)) /\ WF_vars(Acquire(g)) /\ WF_vars(Written(g)) /\ WF_vars(Read(g))
        /\ WF_vars(Answer(g)) /\ WF_vars(TakeOver(g)) /\ WF_vars(Publish(g)) /\ WF_vars(Store(g))
        /\ WF_vars(Settle(g)) /\ WF_vars(Release(g)) /\ WF_vars(CaughtUp(g))

Spec == Init /\ [][Next]_vars /\ Fairness

(* --------------------------------------------------------------- properties *)

\* No message is stored twice.
ExactlyOnce == \A n \in Numbers : stored[n] <= 1

AcknowledgedIsStored == \A n \in acknowledged : stored[n] > 0

\* The gateway with the client's connection owns the session.
ConnectedIsOwner == \A g \in Gateways : client.at = g => mine[g].role = "owner"

\* At most one gateway has a message of the session in flight to Kafka.
OneSends ==
    Cardinality({g \in Gateways : ~Quiet(g)}) <= 1

\* Of the gateways that have read the whole table, at most one considers itself the owner.
OneOwner ==
    \A g, h \in Gateways :
        (g # h /\ read[g] = Len(table) /\ read[h] = Len(table) /\ pending[g] = <<>> /\ pending[h] = <<>>)
            => ~(mine[g].role = "owner" /\ mine[h].role = "owner")

EverythingIsPublished == <>(client.message = Messages + 1)

OwnerIsDead ==
    \E g \in Gateways :
        LET known == ApplyAll(knows[g], SubSeq(table, read[g] + 1, Len(table))) IN
        known.owner # NoGateway /\ Dead(known.owner)
TakenOver == OwnerIsDead ~> ~OwnerIsDead

Symmetry == Permutations(Gateways)
================================================================================
