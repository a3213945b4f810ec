------------------------------ MODULE FlowControl ------------------------------
(* How a sender's credit becomes Kafka's back-pressure and comes back.          *)
(*                                                                              *)
(* Senders (AMQP links; an MQTT client's Receive Maximum and an upload's socket *)
(* are the same contract) send numbered messages to one partition. The gateway  *)
(* counts them in a budget, queues them for the partition, has one batch on the *)
(* way to Kafka, and settles each message when Kafka has answered. Credit comes *)
(* back when a message is settled, never when it is read.                       *)
(*                                                                              *)
(* Faults, each a bounded number of times: Kafka stalls, its answer is lost,    *)
(* the delivery timeout passes, the gateway is killed.                          *)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS
    Senders,     \* a set of links
    Messages,    \* each sender sends 1..Messages, in this order
    Window,      \* W: the most that one link may have outstanding, in messages
    Limit,       \* the high mark of the budget, in messages; half of it is the low mark
    BatchLimit,  \* messages of one batch
    Crashes, Stalls, Losses, Timeouts  \* how often each fault may happen

VARIABLES
    \* The clients. They outlive the gateway.
    toSend,      \* [Senders -> Seq]: still to be sent, in order
    unanswered,  \* [Senders -> Seq]: sent, outcome not known, in order
    accepted,    \* [Senders -> set]: told "accepted": it is stored
    released,    \* [Senders -> set]: told at least once "not known to be stored"
    \* The gateway. All of it is lost when it is killed.
    attached,    \* [Senders -> BOOLEAN]
    credit,      \* [Senders -> Nat]: granted and not used
    unsettled,   \* [Senders -> Nat]: arrived and not settled
    used,        \* what the budget counts
    open,        \* whether the budget's gate is open
    queue,       \* the partition queue: Seq of <<sender, number>>
    batch,       \* the batch on the way to Kafka, empty when none is
    \* Kafka.
    broker,      \* "up" or "stalled"
    appended,    \* whether Kafka has appended the batch that is on the way
    late,        \* batches nobody waits for any more that Kafka may still append
    log,         \* the partition: Seq of <<sender, number>>
    \* History, for the properties alone.
    sent, settled,  \* [Senders -> [1..Messages -> Nat]]: how often each was sent and told an outcome
    faults       \* what is left of each fault

clients == <<toSend, unanswered, accepted, released>>
links   == <<attached, credit, unsettled>>
budget  == <<used, open>>
kafka   == <<broker, appended, late, log>>
history == <<sent, settled>>
vars    == <<clients, links, budget, queue, batch, kafka, history, faults>>

Numbers == 1..Messages
Records == Senders \X Numbers
Zero    == [s \in Senders |-> [n \in Numbers |-> 0]]
Range(seq) == {seq[i] : i \in DOMAIN seq}
OfSender(seq, s) == SelectSeq(seq, LAMBDA record: record[1] = s)
NumbersOf(seq)   == [i \in DOMAIN seq |-> seq[i][2]]
Spend(fault) == faults[fault] > 0 /\ faults' = [faults EXCEPT ![fault] = @ - 1]

Init ==
    /\ toSend = [s \in Senders |-> [n \in Numbers |-> n]]
    /\ unanswered = [s \in Senders |-> <<>>]
    /\ accepted = [s \in Senders |-> {}]
    /\ released = [s \in Senders |-> {}]
    /\ attached = [s \in Senders |-> FALSE]
    /\ credit = [s \in Senders |-> 0]
    /\ unsettled = [s \in Senders |-> 0]
    /\ used = 0
    /\ open = TRUE
    /\ queue = <<>>
    /\ batch = <<>>
    /\ broker = "up"
    /\ appended = FALSE
    /\ late = {}
    /\ log = <<>>
    /\ sent = Zero
    /\ settled = Zero
    /\ faults = [crash |-> Crashes, stall |-> Stalls, loss |-> Losses, timeout |-> Timeouts]

(* ---------------------------------------------------------- client, gateway *)

\* A link attaches, with whatever its client does not know the outcome of before the rest.
Attach(s) ==
    /\ ~attached[s]
    /\ attached' = [attached EXCEPT ![s] = TRUE]
    /\ toSend' = [toSend EXCEPT ![s] = unanswered[s] \o @]
    /\ unanswered' = [unanswered EXCEPT ![s] = <<>>]
    /\ UNCHANGED <<accepted, released, credit, unsettled, budget, queue, batch, kafka, history, faults>>

\* flowcontrol.window.Window.top_up: worth a frame when it is half of the window, or when no credit is left.
Grant(s) ==
    LET grant == Window - unsettled[s] - credit[s] IN
    /\ attached[s]
    /\ open
    /\ grant > 0
    /\ credit[s] = 0 \/ grant * 2 >= Window
    /\ credit' = [credit EXCEPT ![s] = @ + grant]
    /\ UNCHANGED <<clients, attached, unsettled, budget, queue, batch, kafka, history, faults>>

\* Granted credit is honoured whatever the gate says.
Send(s) ==
    /\ attached[s]
    /\ credit[s] > 0
    /\ toSend[s] # <<>>
    /\ LET number == Head(toSend[s]) IN
        /\ toSend' = [toSend EXCEPT ![s] = Tail(@)]
        /\ unanswered' = [unanswered EXCEPT ![s] = Append(@, number)]
        /\ queue' = Append(queue, <<s, number>>)
        /\ sent' = [sent EXCEPT ![s][number] = @ + 1]
    /\ credit' = [credit EXCEPT ![s] = @ - 1]
    /\ unsettled' = [unsettled EXCEPT ![s] = @ + 1]
    /\ used' = used + 1
    /\ open' = (open /\ used' < Limit)
    /\ UNCHANGED <<accepted, released, attached, batch, kafka, settled, faults>>

\* One batch is on the way for a partition, never two.
HandOver ==
    /\ batch = <<>>
    /\ queue # <<>>
    /\ LET count == IF Len(queue) < BatchLimit THEN Len(queue) ELSE BatchLimit IN
        /\ batch' = SubSeq(queue, 1, count)
        /\ queue' = SubSeq(queue, count + 1, Len(queue))
    /\ appended' = FALSE
    /\ UNCHANGED <<clients, links, budget, broker, late, log, history, faults>>

\* Every record of the batch gets its outcome, and its place in budget and window is given back.
Settle(outcome) ==
    /\ settled' = [s \in Senders |-> [n \in Numbers |->
            settled[s][n] + Cardinality({i \in DOMAIN batch : batch[i] = <<s, n>>})]]
    /\ unanswered' = [s \in Senders |-> SelectSeq(unanswered[s], LAMBDA n: <<s, n>> \notin Range(batch))]
    /\ unsettled' = [s \in Senders |-> unsettled[s] - Len(OfSender(batch, s))]
    /\ used' = used - Len(batch)
    /\ open' = (open \/ used' * 2 <= Limit)
    /\ batch' = <<>>
    /\ IF outcome = "accepted"
       THEN /\ accepted' = [s \in Senders |-> accepted[s] \union Range(NumbersOf(OfSender(batch, s)))]
            /\ UNCHANGED <<released, toSend>>
       ELSE /\ released' = [s \in Senders |-> released[s] \union Range(NumbersOf(OfSender(batch, s)))]
            /\ toSend' = [s \in Senders |-> NumbersOf(OfSender(batch, s)) \o toSend[s]]
            /\ UNCHANGED accepted
    /\ UNCHANGED <<attached, credit, queue, sent>>

(* -------------------------------------------------------------------- Kafka *)

StoreBatch ==
    /\ broker = "up"
    /\ batch # <<>>
    /\ ~appended
    /\ log' = log \o batch
    /\ appended' = TRUE
    /\ UNCHANGED <<clients, links, budget, queue, batch, broker, late, history, faults>>

Answer ==
    /\ broker = "up"
    /\ batch # <<>>
    /\ appended
    /\ Settle("accepted")
    /\ appended' = FALSE
    /\ UNCHANGED <<broker, late, log, faults>>

\* What Kafka received before its client was gone or gave up.
StoreLate ==
    /\ broker = "up"
    /\ \E stale \in late :
        /\ log' = log \o stale
        /\ late' = late \ {stale}
    /\ UNCHANGED <<clients, links, budget, queue, batch, broker, appended, history, faults>>

Recover ==
    /\ broker = "stalled"
    /\ broker' = "up"
    /\ UNCHANGED <<clients, links, budget, queue, batch, appended, late, log, history, faults>>

(* ------------------------------------------------------------------- faults *)

Stall ==
    /\ broker = "up"
    /\ Spend("stall")
    /\ broker' = "stalled"
    /\ UNCHANGED <<clients, links, budget, queue, batch, appended, late, log, history>>

\* The batch is sent again. Kafka recognises it by its sequence number, but not from another producer (ADR 0005).
LoseAnswer ==
    /\ batch # <<>>
    /\ appended
    /\ Spend("loss")
    /\ appended' \in BOOLEAN
    /\ UNCHANGED <<clients, links, budget, queue, batch, broker, late, log, history>>

\* kafka.delivery_timeout_s: the clients are told that it is not known whether the records are stored.
GiveUp ==
    /\ broker = "stalled"
    /\ batch # <<>>
    /\ Spend("timeout")
    /\ Settle("released")
    /\ late' = IF appended THEN late ELSE late \union {batch}
    /\ appended' = FALSE
    /\ UNCHANGED <<broker, log>>

\* SIGKILL. Kafka may still append what it had received.
Crash ==
    /\ Spend("crash")
    /\ attached' = [s \in Senders |-> FALSE]
    /\ credit' = [s \in Senders |-> 0]
    /\ unsettled' = [s \in Senders |-> 0]
    /\ used' = 0
    /\ open' = TRUE
    /\ queue' = <<>>
    /\ batch' = <<>>
    /\ late' = IF batch = <<>> \/ appended THEN late ELSE late \union {batch}
    /\ appended' = FALSE
    /\ UNCHANGED <<clients, broker, log, history>>

Next ==
    \/ \E s \in Senders : Attach(s) \/ Grant(s) \/ Send(s)
    \/ HandOver \/ StoreBatch \/ Answer \/ StoreLate \/ Recover
    \/ Stall \/ LoseAnswer \/ GiveUp \/ Crash

Fairness ==
    /\ \A s \in Senders : WF_vars(Attach(s)) /\ WF_vars(Grant(s)) /\ WF_vars(Send(s))
    /\ WF_vars(HandOver) /\ WF_vars(StoreBatch) /\ WF_vars(Answer) /\ WF_vars(Recover)

Spec == Init /\ [][Next]_vars /\ Fairness

(* --------------------------------------------------------------- properties *)

AcknowledgedIsStored == \A s \in Senders : \A n \in accepted[s] : <<s, n>> \in Range(log)

\* Never more outstanding than granted.
WindowHeld == \A s \in Senders : credit[s] + unsettled[s] <= Window

\* The budget counts what is there, and granted credit bounds how far it can go over its limit.
BudgetExact ==
    /\ used = Len(queue) + Len(batch)
    /\ \A s \in Senders : unsettled[s] = Len(OfSender(queue, s)) + Len(OfSender(batch, s))
    /\ used <= Limit - 1 + Window * Cardinality(Senders)

SettledOnce == \A s \in Senders : \A n \in Numbers : settled[s][n] <= sent[s][n]

\* Of two messages of one sender the first is first in the log, unless its client was told that it may not be there.
First(record) == CHOOSE i \in DOMAIN log : log[i] = record /\ \A j \in 1..(i - 1) : log[j] # record
OrderKept ==
    \A s \in Senders : \A n, m \in Numbers :
        (n < m /\ <<s, m>> \in Range(log) /\ n \notin released[s] /\ m \notin released[s])
            => (<<s, n>> \in Range(log) /\ First(<<s, n>>) < First(<<s, m>>))

TypeOK ==
    /\ broker \in {"up", "stalled"}
    /\ \A s \in Senders : credit[s] \in Nat /\ unsettled[s] \in Nat
    /\ used \in Nat

EverythingIsAccepted == \A s \in Senders : <>(accepted[s] = Numbers)

CreditReturns == \A s \in Senders : (toSend[s] # <<>> /\ credit[s] = 0) ~> (credit[s] > 0)
================================================================================
