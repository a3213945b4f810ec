------------------------------ MODULE FlowControl ------------------------------
(* A sender's credit as Kafka's backpressure.                                   *)
(*                                                                              *)
(* Senders (AMQP links; an MQTT client's Receive Maximum and the socket of an   *)
(* upload follow the same contract) send numbered messages to one partition.    *)
(* The gateway counts them in a budget, queues them for the partition, has one  *)
(* batch in flight to Kafka, and settles each message when Kafka has answered.  *)
(* Credit is returned when a message is settled, never when it is read.         *)
(*                                                                              *)
(* Faults, each a bounded number of times: Kafka stalls, its answer is lost,    *)
(* the delivery timeout passes, the gateway is killed.                          *)
EXTENDS Naturals, Sequences, FiniteSets

CONSTANTS
    Senders,     \* a set of links
    Messages,    \* each sender sends 1..Messages, in this order
    Window,      \* W: the maximum outstanding messages of one link
    Limit,       \* the limit of the budget, in messages; the gate opens again at half of it
    BatchLimit,  \* maximum messages of a batch
    Crashes, Stalls, Losses, Timeouts  \* how often each fault may happen

VARIABLES
    \* The clients. They survive a crash of the gateway.
    toSend,      \* [Senders -> Seq]: still to be sent, in order
    unanswered,  \* [Senders -> Seq]: sent without an outcome, in order
    accepted,    \* [Senders -> set]: answered "accepted": it is stored
    released,    \* [Senders -> set]: answered at least once "possibly not stored"
    \* The gateway. All of this is lost when it is killed.
    attached,    \* [Senders -> BOOLEAN]
    credit,      \* [Senders -> Nat]: granted and not used
    unsettled,   \* [Senders -> Nat]: arrived and not settled
    used,        \* the budget's count
    open,        \* whether the budget's gate is open
    queue,       \* the partition queue: Seq of <<sender, number>>
    batch,       \* the batch in flight to Kafka, empty if there is none
    \* Kafka.
    broker,      \* "up" or "stalled"
    appended,    \* whether Kafka has appended the batch in flight
    late,        \* batches that were given up and that Kafka may still append
    log,         \* the partition: Seq of <<sender, number>>
    \* History, used only by the properties.
    sent, settled,  \* [Senders -> [1..Messages -> Nat]]: how often each was sent and got an outcome
    faults       \* remaining number of each fault

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

\* A link attaches; its client sends messages without an outcome first.
Attach(s) ==
    /\ ~attached[s]
    /\ attached' = [attached EXCEPT ![s] = TRUE]
    /\ toSend' = [toSend EXCEPT ![s] = unanswered[s] \o @]
    /\ unanswered' = [unanswered EXCEPT ![s] = <<>>]
    /\ UNCHANGED <<accepted, released, credit, unsettled, budget, queue, batch, kafka, history, faults>>

\* flowcontrol.window.Window.top_up: grants half of the window at least, unless no credit is left.
Grant(s) ==
    LET grant == Window - unsettled[s] - credit[s] IN
    /\ attached[s]
    /\ open
    /\ grant > 0
    /\ credit[s] = 0 \/ grant * 2 >= Window
    /\ credit' = [credit EXCEPT ![s] = @ + grant]
    /\ UNCHANGED <<clients, attached, unsettled, budget, queue, batch, kafka, history, faults>>

\* Granted credit is honoured even if the gate is shut.
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

\* A partition has at most one batch in flight.
HandOver ==
    /\ batch = <<>>
    /\ queue # <<>>
    /\ LET count == IF Len(queue) < BatchLimit THEN Len(queue) ELSE BatchLimit IN
        /\ batch' = SubSeq(queue, 1, count)
        /\ queue' = SubSeq(queue, count + 1, Len(queue))
    /\ appended' = FALSE
    /\ UNCHANGED <<clients, links, budget, broker, late, log, history, faults>>

\* Every record of the batch gets its outcome and is released from budget and window.
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

\* Kafka appends a batch that it received before its client died or gave up.
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

\* The batch is resent. Kafka recognises it by its sequence number, but not from another producer (ADR 0087).
LoseAnswer ==
    /\ batch # <<>>
    /\ appended
    /\ Spend("loss")
    /\ appended' \in BOOLEAN
    /\ UNCHANGED <<clients, links, budget, queue, batch, broker, late, log, history>>

\* kafka.delivery_timeout_s: the clients are answered that the records are possibly not stored.
GiveUp ==
    /\ broker = "stalled"
    /\ batch # <<>>
    /\ Spend("timeout")
    /\ Settle("released")
    /\ late' = IF appended THEN late ELSE late \union {batch}
    /\ appended' = FALSE
    /\ UNCHANGED <<broker, log>>

\* SIGKILL. Kafka may still append a batch that it had received.
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

\* Outstanding messages never exceed the granted credit.
WindowHeld == \A s \in Senders : credit[s] + unsettled[s] <= Window

\* The budget's count is exact, and granted credit bounds its excess over the limit.
BudgetExact ==
    /\ used = Len(queue) + Len(batch)
    /\ \A s \in Senders : unsettled[s] = Len(OfSender(queue, s)) + Len(OfSender(batch, s))
    /\ used <= Limit - 1 + Window * Cardinality(Senders)

SettledOnce == \A s \in Senders : \A n \in Numbers : settled[s][n] <= sent[s][n]

\* Two messages of a sender are in order in the log, unless the first was answered "possibly not stored".
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
